"""Tiny models with random weights of the architectures that transformers knows, made by their
names.
"""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 64
# Kinds whose experts are one parameter a layer, or one for each of its layers' two.
EXPERTS = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3",
    "hy_v4", "inkling2_text", "inkling_text", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna",
    "lfm2_moe", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text",
    "qwen3_moe", "qwen3_next", "solar_open", "zaya",
)  # fmt: skip
# What configurations call their sizes; each takes those that it knows.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state", "head_dim"),
        8,
    ),
    **dict.fromkeys(
        ("attention_window_size", "sliding_window", "mamba_d_head", "moe_intermediate_size"), 16
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "n_group"), 2
    ),
    **dict.fromkeys(("linear_num_value_heads", "conv_kernel", "mamba_n_heads", "rotary_dim"), 4),
    **dict.fromkeys(("shared_expert_intermediate_size", "attention_hidden_size"), 32),
    **dict.fromkeys(("mamba_n_groups", "first_k_dense_replace", "bos_token_id", "topk_group"), 1),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "eos_token_id": 3,
}


# What else single kinds need.
SETTINGS: dict[str, dict[str, object]] = {
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "bamba": {"attn_layer_indices": [1]},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    # It rounds its heads' widths up to such sizes, and its layers do not.
    "xlstm": {"hidden_size": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}
LATENT_ATTENTION = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    "num_key_value_heads": 4,
}


def tiny_config(name: str, **settings: object) -> PretrainedConfig:
    """The text configuration of architecture ``name``, at least one layer of each kind that it
    has.
    """
    default = CONFIG_MAPPING[name]().get_text_config()
    known = {*vars(default), *default.attribute_map}
    taken = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:  # multi-head latent attention
        taken |= LATENT_ATTENTION
    if kinds := list(dict.fromkeys(vars(default).get("layer_types") or ())):
        taken["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        taken["num_hidden_layers"] = len(taken["layer_types"])
    config = type(default)(**taken | settings)
    config.is_decoder = True
    return config


def tiny_causal_lm(name: str, seed: int = 0, **settings: object) -> PreTrainedModel:
    """A causal language model whose logits spread by some units, so that what changes them
    shows.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.9 / parameter.shape[-1] ** 0.5)
    return model.eval()

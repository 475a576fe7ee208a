"""A tiny Llama written as a GGUF file in float32, the way llama.cpp's converter lays it out."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGUFWriter
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NORMAL, CONTROL = 1, 3  # llama.cpp's types of tokens
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    architecture: str = "llama",
) -> None:
    """Write ``model`` and its byte-level BPE ``tokenizer``, with its chat template, to ``file``."""
    config, vocabulary = model.config, tokenizer.get_vocab()
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    special = set(tokenizer.all_special_ids)
    writer.add_token_types([CONTROL if i in special else NORMAL for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in merges(tokenizer)])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in model.named_parameters():
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        rotated = "q_proj" in name or "k_proj" in name
        writer.add_tensor(
            gguf_name(name), (interleaved(weight, heads) if rotated else weight).detach().numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merges(tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """The merges of a byte-level BPE tokenizer, first learned first."""
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return [
        tuple(pair) if isinstance(pair, list) else tuple(pair.split(" "))
        for pair in model["merges"]
    ]


def gguf_name(name: str) -> str:
    """llama.cpp's name of a weight of transformers' Llama."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in llama.cpp's order: the two halves of each head
    alternate.
    """
    rows, columns = weight.shape
    return (
        torch.reshape(weight, (heads, 2, rows // heads // 2, columns))
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )

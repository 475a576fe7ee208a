"""Architectures other than Llama: their logits, their caches, and the refusal of those that cannot
be sampled from.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import SETTINGS, VOCABULARY, tiny_causal_lm, tiny_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    LlamaConfig,
)
from transformers import PretrainedConfig as Config

from rlhf_core.errors import ModelError
from rlhf_core.models.architecture import has_plain_head, positions_of
from rlhf_core.models.forward import selected_logits
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import attention_of, load_model
from rlhf_core.sampling.agreement import require_next_tokens, require_replies_as_scored
from rlhf_core.sampling.distribution import Sampling, philox_uniforms
from rlhf_core.sampling.generation import generate
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.dry_run import ModelVariant, model_size

PLAIN = (
    "llama",
    "qwen3",
    "gpt2",
    "opt",
    "gpt_neox",
    "bloom",
    "phi",
    "olmo2",
    "gemma3_text",
    "mamba",
)
# Soft caps, scales, a layer before the unembedding, a head with a transformation.
OWN = (
    "gemma2",
    "cohere",
    "modernbert-decoder",
    "bert",
    "electra",
    "nanochat",
    "inkling_text",
    "vaultgemma",
)
RECURRENT = ("lfm2", "qwen3_next", "qwen3_5_text", "mamba2", "jamba", "falcon_h1", "olmo_hybrid")
OTHERS = (
    "llama4_text",
    "gemma2",
    "modernbert-decoder",
    "opt",
    "bloom",
    "mpt",
    "gemma3_text",
    "gpt_oss",
)
REFUSED = (
    "minimax",
    "rwkv",
    "mamba",
    "falcon_mamba",
    "recurrent_gemma",
    "roberta",
    "openai-gpt",
    "mbart",
    "xlm",
)


@pytest.mark.parametrize("name", [*PLAIN, *OWN])
def test_lazy_logits_are_those_of_the_models_own_forward(name: str) -> None:
    model = tiny_causal_lm(name)
    ids = torch.randint(4, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        logits = selected_logits(model, ids, mask, mask.bool()).whole()
        expected = model(input_ids=ids, attention_mask=mask).logits.flatten(0, 1)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)
    assert has_plain_head(model) == (name in PLAIN)


def test_a_cap_on_small_logits_is_seen() -> None:
    model = tiny_causal_lm("gemma2")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    assert not has_plain_head(model)


def test_asking_a_model_for_its_head_leaves_the_mode_of_each_layer() -> None:
    model = tiny_causal_lm("llama").eval()
    layer = model.get_decoder().layers[0]
    layer.training = True  # as while a layer's activations are recomputed, in a model that is not in training mode
    assert has_plain_head(model)
    assert [module for module in model.modules() if module.training] == [layer]


@pytest.mark.parametrize("name", ["roberta", "camembert", "xlm-roberta", "data2vec-text", "llama"])
def test_positions_begin_where_the_model_begins_them(name: str) -> None:
    """RoBERTa and its kind count from behind the padding token's id; without positions their own
    forward does.
    """
    model = tiny_causal_lm(name)
    ids = torch.arange(4, 18).view(2, 7)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        logits = selected_logits(model, ids, mask, mask.bool()).whole()
        torch.testing.assert_close(
            logits, model(input_ids=ids, attention_mask=mask).logits.flatten(0, 1)
        )


@pytest.mark.parametrize(
    ("name", "positions"), [("llama", 64), ("mpt", 32), ("roberta", 63), ("bloom", None)]
)
def test_how_many_tokens_a_model_takes(name: str, positions: int | None) -> None:
    assert (
        positions_of(tiny_config(name, **({"max_seq_len": 32} if name == "mpt" else {})))
        == positions
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECURRENT, *OTHERS])
def test_replies_are_sampled_as_they_are_scored(name: str) -> None:
    require_replies_as_scored(tiny_causal_lm(name, **SETTINGS.get(name, {})), name)


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_cannot_be_sampled_from_is_refused_by_name(name: str) -> None:
    model = tiny_causal_lm(name, **SETTINGS.get(name, {}))
    with pytest.raises(ModelError, match=f"{name} is a {type(model).__name__}"):
        require_replies_as_scored(model, name)


# Why they are no models of the next token: what they read, or what their own loss is of.
OTHER_TOKENS = {
    "xlnet": "reads a text in both directions",
    "cpmant": "reads a text in both directions",
    "xlm": "reads a text in both directions",
    "trocr": "own loss is not of the next token",
    "mbart": "own loss is not of the next token",
    "xmod": "Input language unknown",
}


@pytest.mark.parametrize("name", OTHER_TOKENS)
def test_a_model_of_other_tokens_than_the_next_is_refused_before_it_is_trained(name: str) -> None:
    model = tiny_causal_lm(name, **SETTINGS.get(name, {}))
    with pytest.raises(ModelError, match=OTHER_TOKENS[name]) as refused:
        require_next_tokens(model, "models/x")
    assert str(refused.value).startswith(f"models/x is a {type(model).__name__}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "mamba", "rwkv", "roberta"])
def test_a_model_of_the_next_token_is_trained(name: str) -> None:
    require_next_tokens(tiny_causal_lm(name), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *RECURRENT])
def test_a_reply_does_not_depend_on_when_those_beside_it_end(name: str) -> None:
    """Rows are dropped from the cache as replies end; with other ends, others are dropped."""
    model = tiny_causal_lm(name, **SETTINGS.get(name, {}))
    prompts, streams = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]], philox_uniforms(3, range(4), 12)
    endless = generate(
        model, prompts, streams, Sampling(eos_id=-1, pad_id=0, max_new_tokens=12)
    ).replies()
    for stop in {reply[place] for place, reply in zip((0, 2, 5, 8), endless, strict=True)}:
        replies = generate(
            model, prompts, streams, Sampling(eos_id=stop, pad_id=0, max_new_tokens=12)
        ).replies()
        for reply, whole in zip(replies, endless, strict=True):
            assert reply == whole[: whole.index(stop) + 1 if stop in whole else None]


SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "attention"), [(LlamaConfig(**SIZES), "sdpa"), (Gemma2Config(**SIZES), "eager")]
)
def test_what_the_architecture_has(config: Config, attention: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # folders have one; nothing here reads it
    model = load_model(AutoModelForCausalLM, tmp_path, None)
    critic = ScalarModel.from_causal_lm(tmp_path, seed=0)
    for config in (model.config, critic.model.config):
        assert config._attn_implementation == attention
    ids = torch.tensor([[5, 6, 7, 8]])
    for later in (torch.tensor([[5, 6, 7, 9]]), torch.tensor([[5, 6, 1, 2]])):
        same = model(ids).logits[:, :2], model(later).logits[:, :2]
        torch.testing.assert_close(*same)


def test_the_plan_builds_them_too() -> None:
    architecture = Architecture.of(Gemma2Config(**SIZES).to_dict(), "gemma")
    own = sum(
        p.numel() for p in AutoModelForCausalLM.from_config(Gemma2Config(**SIZES)).parameters()
    )
    assert model_size(ModelVariant(architecture, "causal_lm", "float32")).parameters == own


def test_an_unknown_architecture_is_left_to_the_library() -> None:
    assert attention_of(AutoModelForSequenceClassification, Config()) == "sdpa"

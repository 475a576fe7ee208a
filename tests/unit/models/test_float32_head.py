"""Precision: heads of bfloat16 models multiply in float32; a model whose unsaved buffers were
rounded is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_causal_lm
from torch import nn
from transformers import AutoModelForCausalLM
from unit.ppo.tiny import make_tiny

from rlhf_core.config.base import BaseConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.causal_lm import load_policy, new_model, save_policy, train_tokenizer
from rlhf_core.models.forward import hidden_states, selected_logits
from rlhf_core.models.given import require_computed_buffers
from rlhf_core.models.heads import ActorCritic, ScalarModel
from rlhf_core.models.precision import (
    Float32Linear,
    allow_tf32,
    float32_unembedding,
    matmul_precision,
    use_float32_unembedding,
    weights_precision,
)
from rlhf_core.sampling.token_scoring import Tokens, logits_and_values, response_logits

IDS, MASK = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
BATCH = Tokens(IDS, MASK, torch.ones(2, 3, dtype=torch.bool))


@torch.no_grad()
def test_every_way_to_logits_and_values_multiplies_in_float32() -> None:
    tiny = make_tiny()
    policy, critic = (
        tiny.policy.to(torch.bfloat16),
        ScalarModel(tiny.critic.model.to(torch.bfloat16)),
    )
    rounded = policy(input_ids=IDS).logits
    use_float32_unembedding(policy)
    hidden = hidden_states(policy.base_model, IDS, MASK)
    expected = hidden.float() @ policy.lm_head.weight.float().T
    assert rounded.dtype == torch.bfloat16 and not torch.equal(rounded.float(), expected)
    assert torch.equal(policy(input_ids=IDS).logits, expected)
    assert torch.equal(
        selected_logits(policy, IDS, MASK, MASK.bool()).whole(), expected.flatten(0, 1)
    )
    assert torch.equal(response_logits(policy, BATCH).whole(), expected[:, 2:])
    values = critic.hidden(IDS, MASK).float() @ critic.model.score.weight.float().squeeze(0)
    assert torch.equal(critic.token_scores(IDS, MASK), values)
    shared, _ = logits_and_values(ActorCritic.with_head_of(critic, policy), BATCH)
    torch.testing.assert_close(shared.whole(), expected[:, 2:], rtol=0, atol=1e-6)
    assert critic.lm_logits(hidden).whole().dtype == torch.float32


def test_a_float32_model_keeps_its_layer() -> None:
    tiny = make_tiny()
    head = tiny.policy.lm_head
    use_float32_unembedding(tiny.policy)
    assert (
        tiny.policy.lm_head is head
        and type(ScalarModel(tiny.critic.model).model.score) is nn.Linear
    )


def test_parameters_ties_and_names_stay_as_they_are() -> None:
    policy = make_tiny().policy.to(torch.bfloat16)
    policy.lm_head.weight = policy.model.embed_tokens.weight
    names, head = list(policy.state_dict()), policy.lm_head
    with float32_unembedding(policy):
        assert isinstance(policy.lm_head, Float32Linear) and list(policy.state_dict()) == names
        assert policy.lm_head.weight is policy.model.embed_tokens.weight
        policy(input_ids=IDS).logits.square().mean().backward()
    assert policy.lm_head is head and policy.model.embed_tokens.weight.grad is not None


def test_a_loaded_model_computes_its_logits_in_float32_and_is_saved_as_it_was(
    tmp_path: Path,
) -> None:
    tokenizer = train_tokenizer(["a few words"], 262)
    policy = new_model(
        BaseConfig(dtype="bfloat16", layers=1, hidden_size=32, heads=2), tokenizer, seed=1
    )
    save_policy(tmp_path / "model", policy, tokenizer)
    loaded, _ = load_policy(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16 and loaded(input_ids=IDS).logits.dtype == torch.float32
    save_policy(tmp_path / "again", loaded, tokenizer)
    first, again = (tmp_path / name / "model.safetensors" for name in ("model", "again"))
    assert first.read_bytes() == again.read_bytes()


def test_the_precision_of_a_model_is_that_of_its_weights_and_a_cpu_has_no_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    allow_tf32(True)
    assert torch.get_float32_matmul_precision() == before or torch.cuda.is_available()
    policy = make_tiny().policy.cpu()
    assert [matmul_precision(policy.to(d)) for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)] == [
        "float64", "float32", "bfloat16", "bfloat16",
    ]  # fmt: skip


@pytest.mark.parametrize(("allowed", "precision"), [(True, "tf32"), (False, "float32")])
def test_float32_weights_on_a_gpu_are_multiplied_in_tf32_where_it_is_allowed(
    allowed: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnGpu:
        dtype, device = torch.float32, torch.device("cuda")

    model = nn.Module()
    monkeypatch.setattr(model, "parameters", lambda: iter([OnGpu()]))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    assert matmul_precision(model) == precision
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        ({"avx2": True}, "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_multiplies_it(
    capabilities: dict[str, bool], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr("rlhf_core.runtime.distributed.device", lambda: torch.device("cpu"))
    assert weights_precision("auto") == expected
    assert weights_precision("float32") == "float32" and weights_precision("bfloat16") == "bfloat16"


NAMES = ("llama", "gemma3_text", "gptj", "xglm", "gpt_oss", "falcon", "gpt2")
# Models whose parts initialise buffers by attributes of their own.
PARTS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
    },
    "gemma4_text": {},
}
CASTS: dict[str, Callable[[Any], Any]] = {
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "to bfloat16 and back": lambda model: model.bfloat16().float(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_as_it_is_loaded_is_taken_in_every_precision(name: str, tmp_path: Path) -> None:
    model = tiny_causal_lm(name)
    require_computed_buffers(model, "model")
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        require_computed_buffers(
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), "model"
        )


@pytest.mark.parametrize("name", PARTS)
def test_buffers_of_a_part_are_computed_as_the_part_does(name: str) -> None:
    model = tiny_causal_lm(name, **PARTS[name])
    require_computed_buffers(model, "model")
    with pytest.raises(ModelError, match=r"^model: its buffer .* was rounded"):
        require_computed_buffers(model.bfloat16(), "model")


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gptj", "gpt_oss", "falcon"])
def test_a_model_that_was_rounded_is_refused(name: str, cast: str) -> None:
    model = CASTS[cast](tiny_causal_lm(name))
    with pytest.raises(ModelError, match=r"^model: its buffer .* was rounded .*from_pretrained"):
        require_computed_buffers(model, "model")


def test_buffers_of_a_lower_precision_that_were_raised_are_refused(tmp_path: Path) -> None:
    tiny_causal_lm("gemma3_text").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float()
    with pytest.raises(ModelError, match=r"embed_scale.*dtype=torch.float32"):
        require_computed_buffers(model, "model")


def test_nothing_of_the_model_is_changed() -> None:
    model = tiny_causal_lm("gemma3_text")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before |= {name: tensor.clone() for name, tensor in model.named_buffers()}
    require_computed_buffers(model, "model")
    after = {**model.state_dict(), **dict(model.named_buffers())}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.get_default_dtype() == torch.float32

"""Heads of bfloat16 models: float32 products in every way to logits and values; float32 models are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from unit.ppo.tiny import make_tiny

from rlhf_core.config.base import BaseConfig
from rlhf_core.models.causal_lm import load_policy, new_model, save_policy, train_tokenizer
from rlhf_core.models.forward import hidden_states, selected_logits
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
    policy, critic = tiny.policy.to(torch.bfloat16), ScalarModel(tiny.critic.model.to(torch.bfloat16))
    rounded = policy(input_ids=IDS).logits
    use_float32_unembedding(policy)
    hidden = hidden_states(policy.base_model, IDS, MASK)
    expected = hidden.float() @ policy.lm_head.weight.float().T
    assert rounded.dtype == torch.bfloat16 and not torch.equal(rounded.float(), expected)
    assert torch.equal(policy(input_ids=IDS).logits, expected)
    assert torch.equal(selected_logits(policy, IDS, MASK, MASK.bool()).whole(), expected.flatten(0, 1))
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
    assert tiny.policy.lm_head is head and type(ScalarModel(tiny.critic.model).model.score) is nn.Linear


def test_parameters_ties_and_names_stay_as_they_are() -> None:
    policy = make_tiny().policy.to(torch.bfloat16)
    policy.lm_head.weight = policy.model.embed_tokens.weight
    names, head = list(policy.state_dict()), policy.lm_head
    with float32_unembedding(policy):
        assert isinstance(policy.lm_head, Float32Linear) and list(policy.state_dict()) == names
        assert policy.lm_head.weight is policy.model.embed_tokens.weight
        policy(input_ids=IDS).logits.square().mean().backward()
    assert policy.lm_head is head and policy.model.embed_tokens.weight.grad is not None


def test_a_loaded_model_computes_its_logits_in_float32_and_is_saved_as_it_was(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a few words"], 262)
    policy = new_model(BaseConfig(dtype="bfloat16", layers=1, hidden_size=32, heads=2), tokenizer, seed=1)
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

"""Scalar models of kinds that transformers has no classifier for: made, saved and loaded like the
others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import SETTINGS, VOCABULARY, tiny_causal_lm
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhf_core.config.model import LoraConfig
from rlhf_core.models.adapters import merge_adapters
from rlhf_core.models.classifiers import AutoScalarModel
from rlhf_core.models.heads import ScalarModel

FAST = ("granite", "olmoe", "llama4_text", "mamba2")
MORE = (
    "cohere",
    "cohere2",
    "glm4_moe",
    "lfm2",
    "falcon_h1",
    "olmo_hybrid",
    "granitemoe",
    "nemotron_h",
    "afmoe",
)
KINDS = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
IDS = torch.arange(4, 24).view(2, 10) % VOCABULARY


@pytest.fixture(scope="module")
def small(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return tokenizer


@pytest.mark.parametrize("name", KINDS)
def test_a_head_of_our_own_is_saved_and_loaded(
    name: str, small: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = tiny_causal_lm(name, **{"vocab_size": len(small), **SETTINGS.get(name, {})})
    assert type(lm.config) not in AutoModelForSequenceClassification._model_mapping
    scalar = ScalarModel.from_causal_lm(lm, seed=1).eval()
    mask = torch.ones_like(IDS)
    scores = scalar.token_scores(IDS, mask)
    assert scores.shape == IDS.shape and scores.std() > 0
    scores.sum().backward()
    assert scalar.model.get_submodule("score").weight.grad is not None
    scalar.save(tmp_path / "reward", small)
    assert list((tmp_path / "reward").glob("*.safetensors"))
    loaded = ScalarModel.load(tmp_path / "reward")
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.token_scores(IDS, mask), scores.detach(), atol=1e-5, rtol=1e-4
        )
    again = ScalarModel.load(tmp_path / "reward")
    again.add_adapters(LoraConfig(rank=2, alpha=4), seed=1)
    merge_adapters(again)
    with torch.no_grad():
        torch.testing.assert_close(
            again.token_scores(IDS, mask), scores.detach(), atol=1e-5, rtol=1e-4
        )


def test_a_kind_with_a_classifier_keeps_it() -> None:
    lm = tiny_causal_lm("llama")
    made = type(ScalarModel.from_causal_lm(lm, seed=1).model)
    assert made is AutoModelForSequenceClassification._model_mapping[type(lm.config)]
    assert AutoScalarModel._model_mapping[type(lm.config)] is made

"""Reward models that are trained with a prompt computed once for both replies of a pair."""

from __future__ import annotations

import pytest
from architectures import tiny_causal_lm
from unit.training.tiny import SHAPE, preferences, text

from rlhf_core.api.reward_model import train_reward_model
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.causal_lm import new_model, train_tokenizer

TOKENIZER = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
PAIRS = preferences(60)


def config(prefix_sharing: bool) -> RewardConfig:
    batch = PairBatchConfig(token_budget=400, min_pairs=4, max_pairs=8, prefix_sharing=prefix_sharing)
    return RewardConfig(steps=12, eval_every=12, batch=batch, max_tokens=128, optimizer=OptimizerConfig(lr=1e-2))


def test_the_model_is_the_same_but_for_rounding() -> None:
    apart, shared = (
        train_reward_model(new_model(SHAPE, TOKENIZER, seed=1), TOKENIZER, PAIRS, validation=PAIRS, config=config(on))
        for on in (False, True)
    )
    assert shared.metrics["loss"] == pytest.approx(apart.metrics["loss"], rel=1e-3)
    assert shared.metrics["margin_mean"] == pytest.approx(apart.metrics["margin_mean"], rel=1e-3, abs=1e-5)
    assert apart.metrics["accuracy"] > 0.9


def test_a_model_that_cannot_is_refused_by_the_name_of_the_setting() -> None:
    model = tiny_causal_lm("mistral", vocab_size=SHAPE.vocab_size, sliding_window=32)
    refusal = r"reward\.batch\.prefix_sharing: MistralFor\w+ attends to the last 32 tokens only; set it to false"
    with pytest.raises(ModelError, match=refusal):
        train_reward_model(model, TOKENIZER, PAIRS, config=config(prefix_sharing=True))

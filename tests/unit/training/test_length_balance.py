"""Training on length-balanced pairs: what it trains on, what it refuses, and what it measures."""

from __future__ import annotations

import logging

import pytest
from unit.training.tiny import SHAPE, text

from rlhf_core.api.reward_model import train_reward_model
from rlhf_core.config.gates import Condition
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.schema import Message, Preference
from rlhf_core.errors import DataError
from rlhf_core.gates import decide
from rlhf_core.models.causal_lm import new_model, train_tokenizer

CONFIG = RewardConfig(
    steps=40,
    imitation=0.0,
    eval_every=40,
    length_balance="sampling",
    batch=PairBatchConfig(token_budget=1000, min_pairs=8, max_pairs=16),
    optimizer=OptimizerConfig(lr=3e-2),
)


def pair(i: int, chosen_words: int, rejected_words: int, good: str = "", bad: str = "") -> Preference:
    """A pair of replies of so many words, on the same prompt as every other."""
    prompt = [Message("user", "the sky")]
    chosen, rejected = f"{good}{'red ' * chosen_words}", f"{bad}{'red ' * rejected_words}"
    return Preference(str(i), prompt, chosen, rejected, None, "fact", "test", str(i))


def biased_pairs(n: int) -> list[Preference]:
    """Pairs in which the longer reply is preferred in nine of ten, and "big" in three of four."""
    # 40 pairs hold every combination of the two, in proportion.
    kinds = [((9, 3) if i % 10 else (3, 9), ("big ", "small ") if i // 10 else ("small ", "big ")) for i in range(40)]
    return [pair(i, *words, *style) for i in range(n) for words, style in [kinds[i % 40]]]


@pytest.fixture(scope="module")
def base():  # type: ignore[no-untyped-def]
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    return new_model(SHAPE, tokenizer, seed=1), tokenizer


def test_balanced_training_takes_length_out_of_the_reward(base) -> None:  # type: ignore[no-untyped-def]
    train, held_out = biased_pairs(400), biased_pairs(400)
    plain_config = CONFIG.model_copy(update={"length_balance": "none"})
    plain, balanced = (
        train_reward_model(*base, train, validation=held_out, config=config).metrics
        for config in (plain_config, CONFIG)
    )
    assert plain["train_length_balanced_pairs"] == balanced["train_length_balanced_pairs"] == 80
    assert plain["length_balanced_pairs"] == balanced["length_balanced_pairs"] == 80
    # Length is the better predictor of the two, and the plain model follows it; where it predicts nothing, the word is
    # right in about three of four.
    assert plain["accuracy"] == 0.9 and plain["accuracy_length_balanced"] == 0.5
    assert balanced["accuracy"] == 0.75 and balanced["accuracy_length_balanced"] > 0.65
    assert abs(balanced["length_correlation"]) < 0.6 * plain["length_correlation"]


def test_pairs_that_cannot_be_balanced_are_refused_in_one_line(base) -> None:  # type: ignore[no-untyped-def]
    rows = [pair(i, 5, 2) for i in range(30)] + [pair(30, 2, 5)]
    with pytest.raises(DataError, match=r"reward.length_balance: sampling leaves 2 of 31 .*30 prefer the longer") as e:
        train_reward_model(*base, rows, validation=rows, config=CONFIG)
    assert "\n" not in str(e.value) and "reward.length_balance: none" in str(e.value)


def test_too_few_balanced_pairs_leave_the_metric_out_and_fail_its_gate(base, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    rows = biased_pairs(80)
    config = CONFIG.model_copy(update={"steps": 1})
    with caplog.at_level(logging.WARNING):
        metrics = train_reward_model(*base, rows, validation=rows[:40], config=config).metrics
    assert "validation pairs: 8 can be balanced by length and 50 are needed" in caplog.text
    bound = Condition(metric="accuracy_length_balanced_low95", at_least=0.5, why="better than length")
    decision = decide("reward", [bound], metrics)
    assert not decision.passed
    assert decision.failure() == "the reward gate failed: accuracy_length_balanced_low95 is missing, bound >= 0.5"

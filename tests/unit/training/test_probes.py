"""Probes of a reward model: what is measured, of what, and what is said where a set cannot show
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.training.tiny import SHAPE, text

from rlhf_core.api.reward_model import train_reward_model
from rlhf_core.config.gates import PROBES, WORLD_PROBES, Condition
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.schema import Message, Preference
from rlhf_core.gates import decide
from rlhf_core.models.causal_lm import new_model, train_tokenizer
from rlhf_core.training.reward.probes import FEWEST_PAIRS, probes_of, rate_with_bounds

CONFIG = RewardConfig(
    steps=60,
    imitation=0.0,
    eval_every=60,
    max_tokens=128,
    batch=PairBatchConfig(token_budget=2000, min_pairs=8, max_pairs=16),
    optimizer=OptimizerConfig(lr=3e-2),
)
KINDS = set(PROBES)


@pytest.fixture(scope="module")
def base() -> Any:
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    return new_model(SHAPE, tokenizer, seed=1), tokenizer


def long_is_good(count: int) -> list[Preference]:
    """Pairs in which three sentences are preferred to one, whatever they say."""
    rows = []
    for i in range(count):
        sentences = [f"the sky is {text(i + j, 3)}." for j in range(3)]
        prompt = [Message("user", text(i, 2))]
        rows.append(
            Preference(
                str(i), prompt, " ".join(sentences), sentences[0], None, "", "files", f"g{i}"
            )
        )
    return rows


def test_a_model_that_knows_length_alone_is_told_by_its_probes(base: Any) -> None:
    metrics = train_reward_model(
        *base, long_is_good(200), validation=long_is_good(60), config=CONFIG
    ).metrics
    probes = metrics["probes"]
    assert metrics["accuracy"] > 0.9
    assert probes["cut_in_half"] > 0.9, "a cut reply is the shorter one"
    assert probes["sentence_repeated"] < 0.4, "it pays for more of the same"
    assert 0.3 < probes["other_question"] < 0.7
    for kind in set(PROBES) - set(probes.get("absent", {})):
        assert 0 <= probes[f"{kind}_low95"] <= probes[kind] <= probes[f"{kind}_high95"] + 1e-9
        assert FEWEST_PAIRS <= probes[f"{kind}_pairs"] <= 60


def test_models_with_the_same_seed_are_tried_on_the_same_pairs(base: Any) -> None:
    first, second = (probes_of(long_is_good(60), base[1], 128, seed=4) for _ in range(2))
    assert first.kinds.tolist() == second.kinds.tolist()
    assert [list(pair.rejected) for pair in first.pairs] == [
        list(pair.rejected) for pair in second.pairs
    ]


def test_what_a_set_cannot_show_has_a_reason_and_fails_its_gate(base: Any) -> None:
    rows = [
        Preference(str(i), [Message("user", f"x{i}")], "good", "bad", None, "", "files", str(i))
        for i in range(40)
    ]
    metrics = train_reward_model(
        *base, rows, validation=rows, config=CONFIG.model_copy(update={"steps": 1})
    ).metrics
    absent = metrics["probes"]["absent"]
    assert set(absent) >= {"values_swapped", "sentences_shuffled", "cut_in_half"}
    assert not set(metrics["probes"]) & set(absent)
    bounds = [
        Condition(metric=f"probes.{name}", at_least=0.5, why="x")
        for name in ("cut_in_half", "cut_in_half_low95")
    ]
    decision = decide("reward", bounds, metrics)
    assert not decision.passed
    for condition in decision.conditions:
        assert condition.note == f"missing: {absent['cut_in_half']}"
    assert absent["cut_in_half"].startswith("0 of 40 held-out replies have six words")


def test_pairs_beyond_the_models_length_are_left_out(base: Any) -> None:
    rows = long_is_good(60)
    assert set(probes_of(rows, base[1], 8, seed=1).absent) == KINDS
    lengths = [pair.length for pair in probes_of(rows, base[1], 60, seed=1).pairs]
    assert lengths and max(lengths) <= 60


def test_no_rows_make_no_probes(base: Any) -> None:
    assert set(probes_of([], base[1], 128, seed=1).absent) == KINDS


def test_a_rate_and_its_bounds_count_questions_and_give_a_tie_half() -> None:
    margins = np.array([1.0, 2.0, 0.0, -1.0] * 25)
    rate = rate_with_bounds("kind", margins, np.arange(100))
    assert rate["kind"] == 0.625 and rate["kind_pairs"] == 100
    # Wilson's bounds of 0.5 and of 0.75 with n = 100.
    assert rate["kind_low95"] == pytest.approx(0.4038, abs=1e-4) and rate[
        "kind_high95"
    ] == pytest.approx(0.8245, abs=1e-4)
    # All replies to one of four questions fail together: they are worth fewer.
    of_four = rate_with_bounds("kind", np.sort(margins), np.arange(100) // 25)
    assert (
        of_four["kind_low95"] < rate["kind_low95"] and of_four["kind_high95"] > rate["kind_high95"]
    )


def test_only_the_world_has_its_own_kinds(base: Any, tmp_path: Path) -> None:
    assert not set(probes_of(long_is_good(60), base[1], 128, seed=1).kinds) & set(WORLD_PROBES)

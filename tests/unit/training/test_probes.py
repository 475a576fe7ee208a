"""Probes of a reward model: what is measured, of what, and what is said where a set cannot show
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clean_files import write_rows
from unit.training.tiny import SHAPE, stage_paths, text

from rlhf_core.api.reward_model import train_reward_model
from rlhf_core.config.gates import ABSENT, PROBES, WORLD_PROBES, Condition
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.reward import PairBatchConfig, RefereeConfig, RewardConfig
from rlhf_core.data.schema import Message, PairUser, Preference
from rlhf_core.data.statistics import cluster_codes
from rlhf_core.gates import decide
from rlhf_core.models.causal_lm import new_model, save_policy, train_tokenizer
from rlhf_core.stages import reward
from rlhf_core.training.reward.evaluation import evaluate_scores
from rlhf_core.training.reward.probes import FEWEST_PAIRS, probes_of, rate_with_bounds
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

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


def test_the_numbers_of_the_reward_gate_can_be_computed_again_from_files(
    base: Any, tmp_path: Path
) -> None:
    for split, count in (("train", 60), ("validation", 50), ("test", 40)):
        path = tmp_path / f"data/clean/{PairUser.REFEREE}/{split}.parquet"
        write_rows(path, long_is_good(count))
        write_rows(tmp_path / f"data/clean/{PairUser.REWARD}/{split}.parquet", long_is_good(count))
    save_policy(tmp_path / "models/base", *base)
    config = RefereeConfig.model_validate(
        {**CONFIG.model_dump(), "init": "base", "steps": 2, "eval_every": 2}
    )
    paths = stage_paths(reward.REFEREE, tmp_path, tmp_path)
    context = RunContext(tmp_path / "work", folder=tmp_path)
    metrics: dict[str, Any] = dict(reward.REFEREE.run(config, *paths, context))

    def kept(name: str) -> list[dict[str, Any]]:
        lines = (tmp_path / f".rlhf/referee_{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    pairs = kept("validation")
    columns = {
        key: np.array([row[key] for row in pairs])
        for key in ("chosen", "rejected", "chosen_tokens", "rejected_tokens")
    }
    found = evaluate_scores(
        *columns.values(),
        seed=derive_seed(config.seed, "length_balanced", "validation"),
        clusters=cluster_codes([row["cluster"] for row in pairs]),
    )
    assert len(pairs) == metrics["pairs"] and {"accuracy", "ece", "length_correlation"} < set(found)
    assert found == {key: metrics[key] for key in found}
    probed = kept("probes")
    kinds = {row["kind"] for row in probed}
    assert kinds and all(row["better_reply"] != row["worse_reply"] for row in probed)
    counted: dict[str, Any] = {}
    for kind in kinds:
        of_kind = [row for row in probed if row["kind"] == kind]
        margins = np.array([row["better"] - row["worse"] for row in of_kind])
        clusters = np.array([row["cluster"] for row in of_kind])
        counted |= rate_with_bounds(kind, margins, clusters)
    assert counted == {key: value for key, value in metrics["probes"].items() if key != ABSENT}


def test_only_the_world_has_its_own_kinds(base: Any, tmp_path: Path) -> None:
    assert not set(probes_of(long_is_good(60), base[1], 128, seed=1).kinds) & set(WORLD_PROBES)

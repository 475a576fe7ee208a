"""The experiment on annotated cases: equal sets from one pool, label noise, accuracy by gold, paired differences."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.annotated_cases.__main__ import main
from benchmarks.annotated_cases.cases import choice, equal_cases, fill_form, gold_agreement
from benchmarks.annotated_cases.held_out import pairwise_accuracy
from benchmarks.annotated_cases.results import ArmResult, add_result, load_results, paired_difference, write_summary
from rlhf_core.evaluation.judges.human.answers import import_answers
from rlhf_core.evaluation.judges.human.pairs import AnnotationPair, Candidate, blinded_export
from rlhf_core.world import gold
from rlhf_core.world.corpus import AnnotatorConfig, preferences

POOL = [
    Candidate(row["prompt"], row["category"], "", row["rejected"], row["chosen"])
    for row in preferences(3, 400, contrast_share=1.0)
]
SHARP, INDIFFERENT = AnnotatorConfig(1000.0, 0.0), AnnotatorConfig(1e-9, 0.0)


def asked(bad_cases: int, control: int) -> list[AnnotationPair]:
    return list(blinded_export(POOL, range(bad_cases), control, seed=2).pairs)


def gold_gain(pair: AnnotationPair) -> float:
    """Gold of the reply shown first minus that of the other."""
    prompt = pair.prompt[-1]["content"]
    return gold.score(prompt, pair.reply_1, True) - gold.score(prompt, pair.reply_2, True)


def test_both_sets_have_as_many_pairs_of_one_pool() -> None:
    arms = equal_cases(asked(40, 60), 30)
    assert [len(arms[arm]) for arm in ("random", "bad")] == [30, 30]
    assert all(pair.bad_case for pair in arms["bad"]) and all(pair.control for pair in arms["random"])
    assert len({pair.id for pair in arms["random"]}) == 30
    # Where the pool has fewer bad cases than asked for, the random set shrinks with them.
    fewer = equal_cases(asked(8, 60), 30)
    assert [len(fewer[arm]) for arm in ("random", "bad")] == [8, 8]


def test_sharp_annotators_follow_gold_and_indifferent_ones_toss_a_coin() -> None:
    pairs = [pair for pair in asked(0, 400) if abs(gold_gain(pair)) > 0.02]
    assert len(pairs) > 200
    assert [choice(pair, SHARP, 1) for pair in pairs] == ["1" if gold_gain(pair) > 0 else "2" for pair in pairs]
    assert gold_agreement(pairs, SHARP, 1) == 1.0
    tossed = gold_agreement(pairs, INDIFFERENT, 1)
    assert tossed is not None and 0.4 < tossed < 0.6
    assert gold_agreement([], SHARP, 1) is None


def test_label_noise_is_that_of_bradley_and_terry() -> None:
    annotators = AnnotatorConfig(2.0, 0.0)
    pairs = [pair for pair in asked(0, 400) if abs(gold_gain(pair)) > 0.02]
    labels = [choice(pair, annotators, seed) == "1" for pair in pairs for seed in range(20)]
    expected = [1 / (1 + math.exp(-2.0 * gold_gain(pair))) for pair in pairs for _ in range(20)]
    deviation = math.sqrt(sum(p * (1 - p) for p in expected))
    assert abs(sum(labels) - sum(expected)) < 4 * deviation
    agreed = sum(label == (p > 0.5) for label, p in zip(labels, expected, strict=True))
    assert abs(agreed - sum(max(p, 1 - p) for p in expected)) < 4 * deviation


def test_a_pair_has_one_label_in_both_sets_and_the_seed_decides_it() -> None:
    pairs = asked(400, 400)
    annotators = AnnotatorConfig(0.5, 0.0)
    labels = [choice(pair, annotators, 1) for pair in pairs]
    assert labels == [choice(pair, annotators, 1) for pair in pairs]
    assert labels != [choice(pair, annotators, 2) for pair in pairs]


def test_the_filled_form_is_imported_as_preferences(tmp_path: Path) -> None:
    export = blinded_export(POOL, range(5), 5, seed=2)
    export.save_key(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    bad = equal_cases(export.pairs, 5)["bad"]
    fill_form(tmp_path / "bad.jsonl", bad, SHARP, 1)
    (result,) = import_answers(tmp_path, [tmp_path / "bad.jsonl"], replace=True)["results"]
    assert result["preferences"] == 5 and result["collected"] and result["answered"] == {"world": 5}
    rows = [json.loads(line) for line in (tmp_path / result["file"]).read_text().splitlines()]
    assert {row["source"] for row in rows} == {f"annotations/{export.name}"}
    for row in rows:
        prompt = row["prompt"][-1]["content"]
        chosen, rejected = (row[name][-1]["content"] for name in ("chosen", "rejected"))
        assert gold.score(prompt, chosen, True) >= gold.score(prompt, rejected, True)


def test_accuracy_by_gold_leaves_out_what_gold_does_not_decide() -> None:
    gold_gains = np.array([1.0, -1.0, 0.5, 0.0, 0.005, -0.2])
    reward_gains = np.array([0.1, -3.0, -1.0, 9.0, 9.0, 0.0])
    # Decided are four: right, right, wrong, tie of reward.
    assert pairwise_accuracy(reward_gains, gold_gains) == (1 + 1 + 0 + 0.5) / 4
    assert pairwise_accuracy(np.array([1.0]), np.array([0.0])) is None


def test_differences_are_paired_over_the_seeds_that_have_both() -> None:
    values = {1: (0.70, 0.71), 2: (0.60, 0.63), 3: (0.80, 0.80), 4: (0.50, 0.54), 5: (0.65, 0.67)}
    results = [
        ArmResult(seed, arm, {"gold_accuracy": value})
        for seed, pair in values.items()
        for arm, value in zip(("random", "bad"), pair, strict=True)
    ]
    results += [ArmResult(6, "bad", {"gold_accuracy": 0.1}), ArmResult(7, "random", {"test_accuracy": 0.1})]
    interval = paired_difference(results, "gold_accuracy", "bad", "random")
    # Differences .01 .03 0 .04 .02: mean .02, s = sqrt(.001 / 4) = .015811, s / sqrt(5) = .007071, t(.975, 4) = 2.7764.
    assert interval.n == 5 and interval.mean == pytest.approx(0.02)
    assert interval.high - interval.mean == pytest.approx(2.7764 * 0.0070711, rel=1e-4)
    assert interval.mean - interval.low == pytest.approx(2.7764 * 0.0070711, rel=1e-4)
    assert paired_difference(results, "test_accuracy", "bad", "random").n == 0


def test_results_are_kept_by_seed_and_arm_and_the_last_one_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert load_results(file) == []
    add_result(file, ArmResult(1, "none", {"gold_accuracy": 0.5}))
    add_result(file, ArmResult(1, "bad", {"gold_accuracy": 0.6}))
    add_result(file, ArmResult(1, "none", {"gold_accuracy": 0.55}))
    assert {(one.arm, one.metrics["gold_accuracy"]) for one in load_results(file)} == {("none", 0.55), ("bad", 0.6)}
    write_summary(tmp_path / "summary.json", load_results(file))
    (difference,) = json.loads((tmp_path / "summary.json").read_text())["differences"]
    assert difference["mean"] == pytest.approx(0.05) and difference["n"] == 1
    assert difference["low"] is None and difference["high"] is None


def test_a_workspace_that_cannot_be_annotated_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\ncollect: {source: files, files: {preferences: [a.jsonl]}}\n")
    arguments = ["--workspaces", str(tmp_path), "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["annotated_cases", *arguments])
    assert main() == 2
    assert "gold knows the synthetic world alone" in capsys.readouterr().err
    (tmp_path / "params.yaml").write_text("seed: 1\ncollect: {source: world}\n")
    assert main() == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/models/sft does not exist; finish the workspace's run first"
    ]

"""The sentence of a verdict: made of the conditions that decided, so that it cannot contradict the
gate.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.config.gates import Condition
from rlhf_core.evaluation import match
from rlhf_core.evaluation.verdict import (
    EVEN_WIN_RATE,
    Standing,
    describe_condition,
    judge_results,
    percent,
    standing_of,
    verdict_sentence,
)
from rlhf_core.gates import GateDecision, check, decide, describe_loss
from rlhf_core.storage.files import read_json


def compared(
    win_rate: float, low: float, high: float, equal_length: tuple[float, float, float]
) -> dict[str, Any]:
    names = ("win_rate", "win_rate_low95", "win_rate_high95")
    judge = dict(zip(names, (win_rate, low, high), strict=True))
    judge |= {f"lc_{name}": value for name, value in zip(names, equal_length, strict=True)}
    return {"comparison": {"judge": judge | {"prompts": 320, "clusters": 103}}}


def gate_of(metrics: dict[str, Any], **bounds: float) -> GateDecision:
    names = {
        "win_rate": "comparison.judge.win_rate_low95",
        "equal_length": "comparison.judge.lc_win_rate_low95",
    }
    conditions = [
        Condition(metric=names[name], at_least=bound, why="w") for name, bound in bounds.items()
    ]
    return decide("policy", conditions, metrics)


def test_a_policy_that_wins_and_is_stopped_says_both_with_the_interval_that_decided() -> None:
    metrics = compared(0.7, 0.649, 0.751, (0.567, 0.4996, 0.632))
    gate = gate_of(metrics, win_rate=0.5, equal_length=0.5)
    assert verdict_sentence(judge_results(metrics["comparison"]), "SFT", gate) == (
        "better than SFT: wins 70.0 % (95 % interval 64.9 to 75.1 %) by judge; "
        "the policy gate failed: not shown better at equal lengths: 56.7 % (95 % interval 49.96 to 63.2 %) by judge, "
        "lower end required ≥ 50 %"
    )


def test_a_gate_that_passed_is_told_with_how_much_it_asked() -> None:
    metrics = compared(0.7, 0.649, 0.751, (0.6, 0.55, 0.65))
    gate = gate_of(metrics, win_rate=0.5, equal_length=0.5)
    assert verdict_sentence(judge_results(metrics["comparison"]), "SFT", gate).endswith(
        "the policy gate passed: all 2 conditions hold"
    )


def test_a_gate_that_only_reports_is_told_as_failed_and_that_the_run_went_on() -> None:
    metrics = compared(0.5, 0.45, 0.55, (0.5, 0.45, 0.55))
    conditions = [Condition(metric="comparison.judge.win_rate_low95", at_least=0.5, why="w")]
    gate = decide("policy", conditions, metrics, mode="report")
    sentence = verdict_sentence(judge_results(metrics["comparison"]), "SFT", gate)
    assert (
        sentence.startswith("not shown better than SFT")
        and "failed (mode report: the run went on)" in sentence
    )


@pytest.mark.parametrize(
    ("rate", "said"),
    [(0.7, "better than the champion: wins 70.0 %"), (0.5, "not shown better than the champion")],
)
def test_a_match_of_two_folders_ends_with_what_it_showed(
    rate: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compared(rate, rate - 0.05, rate + 0.05, (0.6, 0.55, 0.65))
    monkeypatch.setattr(match, "run_match", lambda *_: found)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    output = tmp_path / "r.json"
    words = ["match", "-w", str(tmp_path), "--champion", "a", "--challenger", "b"]
    printed = CliRunner().invoke(app, [*words, "--output", str(output)])
    assert printed.exit_code == 0, printed.output
    assert said in printed.stdout and "60.0 % at equal length" in printed.stdout
    assert str(output) in printed.stdout and read_json(output) == found


SHARES = st.floats(0.0, 1.0).map(lambda share: round(share, 9))


@given(st.tuples(SHARES, SHARES, SHARES).map(sorted), st.sampled_from([0.05, 0.5, 0.55]))
def test_what_is_written_never_contradicts_what_was_decided(ends: list[float], bar: float) -> None:
    low, rate, high = ends
    metrics = compared(rate, low, high, (rate, low, high))
    gate = gate_of(metrics, win_rate=bar, equal_length=bar)
    judges = judge_results(metrics["comparison"])
    sentence = verdict_sentence(judges, "SFT", gate)
    assert ("gate passed" in sentence) == gate.passed and ("gate failed" in sentence) == (
        not gate.passed
    )
    for condition in gate.failed:
        written = describe_condition(condition)
        found = re.search(r"interval ([\d.]+) to", written)
        assert found is not None and float(found[1]) < 100 * bar, written
        assert float(condition.measured) < float(condition.required.removeprefix("≥ "))
    found = re.search(r"interval ([\d.]+) to ([\d.]+) %", sentence)
    assert found is not None
    if standing_of(judges) is Standing.BETTER:
        assert float(found[1]) > 100 * EVEN_WIN_RATE
    if standing_of(judges) is Standing.WORSE:
        assert float(found[2]) < 100 * EVEN_WIN_RATE


@pytest.mark.parametrize(
    ("share", "written"),
    [(0.5, "50.0"), (0.4996, "49.96"), (0.50000001, "50.000001"), (0.567, "56.7")],
)
def test_a_share_near_a_bar_has_digits_that_tell_them_apart(share: float, written: str) -> None:
    assert percent(share, 0.5) == written


@pytest.mark.parametrize(
    ("loss", "high", "words"),
    [
        (-0.38, -0.29, "better by 0.38, at worst by 0.29"),
        (-0.01, 0.02, "better by 0.01, at worst worse by 0.02"),
        (0.01, 0.03, "worse by 0.01, at worst by 0.03"),
        (0.0, 0.02, "equal, at worst worse by 0.02"),
        (-0.01, 0.0, "better by 0.01, at worst equal"),
    ],
)
def test_a_loss_is_told_in_words_and_not_by_the_sign_of_a_bound(
    loss: float, high: float, words: str
) -> None:
    assert describe_loss(loss, high) == words
    condition = Condition(metric="repetition", worse_by_less_than=0.02, why="w")
    measured = {"losses": {"repetition": {"loss": loss, "loss_high95": high, "baseline": 0.5}}}
    assert check(condition, measured).measured == words


@pytest.mark.parametrize(
    "rule",
    [
        Condition(metric="kl", at_most=6.0, why="w"),
        Condition(metric="kl", at_most_of="nothing", why="w"),
        Condition(metric="nothing", at_least=0.5, why="w"),
        Condition(metric="comparison.judge.lc_win_rate_low95", at_least=0.6, why="w"),
        Condition(metric="repetition", worse_by_less_than=0.02, why="w"),
        Condition(metric="repetition", worse_by_less_than=0.02, where_at_least=0.9, why="w"),
    ],
)
def test_a_record_is_read_as_it_was_decided(rule: Condition) -> None:
    metrics = compared(0.7, 0.6, 0.8, (0.6, 0.55, 0.65))
    metrics |= {
        "kl": 7.0,
        "losses": {"repetition": {"loss": 0.1, "loss_high95": 0.2, "baseline": 0.5}},
    }
    decision = decide("policy", [rule], metrics, evidence={"metrics/evaluation.json": "abc"})
    assert GateDecision.of("policy", decision.as_dict()) == decision
    assert describe_condition(decision.conditions[0])

"""The verdict of a run: by independent judges with intervals, never by reward, never by a stale evaluation."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flows.commands.summary import verdict_rows
from flows.pipeline.verdict import RegistrationResult, RunVerdict, reach_verdict, verdict_markdown
from flows.registry.decisions import PromotionDecision
from flows.stage.outcome import StageOutcome
from rlhf_core.errors import EXIT_GATE_FAILED
from rlhf_core.evaluation.verdict import Standing, judge_results, standing_of

EVALUATED = {name: StageOutcome.ran(name, 0.0, 1.0, 1.0) for name in ("evaluate", "report")}


def interval(low: float, rate: float, high: float) -> dict[str, float]:
    return {"win_rate": rate, "win_rate_low95": low, "win_rate_high95": high, "prompts": 320, "clusters": 103}


def workspace_with(folder: Path, **judges: dict[str, float]) -> Path:
    evaluation = {"comparison": judges, "kl": 1.9, "kl_low95": 1.7, "kl_high95": 2.1}
    (folder / "metrics").mkdir()
    (folder / "metrics" / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def decided(**changes: Any) -> PromotionDecision:
    return PromotionDecision(**{"model": "m", "challenger": "4", "champion": "3", "bar": 0.5, **changes})


@pytest.mark.parametrize(
    ("judge", "gold", "standing"),
    [
        ((0.51, 0.6, 0.7), (0.55, 0.6, 0.65), Standing.BETTER),
        ((0.51, 0.6, 0.7), (0.50, 0.6, 0.65), Standing.NOT_SHOWN_BETTER),  # one half exactly is a tie everywhere
        ((0.45, 0.5, 0.55), (0.40, 0.45, 0.49), Standing.WORSE),
        ((0.60, 0.7, 0.80), (0.20, 0.3, 0.40), Standing.NOT_SHOWN_BETTER),  # the judges contradict each other
    ],
)
def test_the_standing_is_by_the_intervals_of_every_judge(
    judge: tuple[float, ...], gold: tuple[float, ...], standing: Standing
) -> None:
    assert standing_of(judge_results({"judge": interval(*judge), "gold": interval(*gold)})) is standing


def test_the_reward_model_is_no_judge(tmp_path: Path) -> None:
    workspace_with(tmp_path, reward=interval(0.8, 0.9, 0.95), judge=interval(0.4, 0.5, 0.6))
    verdict = reach_verdict(tmp_path, EVALUATED, RegistrationResult("policy version 4", decided(champion=None)))
    assert verdict.headline == "not shown better than SFT"
    assert [judge.judge for judge in verdict.judges] == ["judge"]


def test_the_referee_selected_the_policy_and_does_not_judge_it(tmp_path: Path) -> None:
    low, even = interval(0.4, 0.5, 0.6), interval(0.7, 0.8, 0.9)
    workspace_with(tmp_path, judge=low, referee=even, reward=even, gold=even)
    verdict = reach_verdict(tmp_path, EVALUATED, RegistrationResult("policy version 4", decided(champion=None)))
    assert [judge.judge for judge in verdict.judges] == ["gold", "judge"]
    assert verdict.headline == "not shown better than SFT"


def test_a_match_makes_the_champion_the_opponent(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    match = {"comparison": {"judge": interval(0.2, 0.3, 0.4)}}
    decision = decided(match=match).refused("not above 0.5 with 95 % confidence by judge")
    verdict = reach_verdict(tmp_path, EVALUATED, RegistrationResult("policy version 4", decision))
    assert verdict.headline == "worse than champion version 3"
    assert verdict.judges[0].low95 == 0.2 and verdict.kl is not None and verdict.kl.high95 == 2.1
    assert verdict.promotion == "not promoted: not above 0.5 with 95 % confidence by judge"
    assert verdict.next_command == "rlhf chat models/policy"


def test_a_promoted_policy_is_talked_to_next(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    decision = decided(champion=None).accepted("there was no champion")
    verdict = reach_verdict(tmp_path, EVALUATED, RegistrationResult("policy version 4", decision))
    assert verdict.headline == "better than SFT"
    assert verdict.promotion == "version 4 is champion: there was no champion"
    assert (verdict.report, verdict.next_command) == ("report.html", "rlhf chat")


def test_evaluation_and_report_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    (tmp_path / "report.html").touch()
    outcomes = {"sft": StageOutcome.failed("sft", "out of memory\nmore"), "evaluate": StageOutcome.skipped("evaluate")}
    verdict = reach_verdict(tmp_path, outcomes, RegistrationResult())
    assert verdict.standing is Standing.NOT_COMPARED and verdict.kl is None and verdict.report is None
    assert verdict.headline == "no verdict: sft failed: out of memory"
    assert verdict.registered == "nothing: sft failed: out of memory"
    assert verdict.promotion == "not promoted: nothing was registered"
    assert (verdict.next_command, verdict.next_hint) == ("rlhf run", "resumes from the last checkpoint")


def test_a_failed_gate_is_named_with_its_conditions(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    (tmp_path / "gates").mkdir()
    conditions = [
        {"metric": "kl", "value": 7.1, "bound": "<= 6", "passed": False},
        {"metric": "policy.length", "value": 20.0, "bound": "<= 30", "passed": True},
    ]
    (tmp_path / "gates" / "policy.json").write_text(json.dumps({"passed": False, "conditions": conditions}))
    failed = StageOutcome.failed("gate-policy", "gate policy: failed\n a table", EXIT_GATE_FAILED)
    verdict = reach_verdict(tmp_path, {**EVALUATED, "gate-policy": failed}, RegistrationResult())
    assert verdict.headline == "better than SFT"
    assert verdict.registered == "nothing: gate-policy failed: kl is 7.1, bound ≤ 6"
    assert "params.yaml" in verdict.next_hint


def test_a_promotion_that_waits_is_the_next_command(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    off = RegistrationResult("version 4", undecided_because="registry.auto_promote is off")
    verdict = reach_verdict(tmp_path, EVALUATED, off)
    assert verdict.promotion == "not promoted: registry.auto_promote is off"
    assert verdict.next_command == "rlhf promote"


def test_a_version_that_waits_for_approval_names_the_command_that_decides(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    waits = PromotionDecision("rlhf-policy", "4", "3", 0.5, reason="it won", awaiting_approval=True)
    verdict = reach_verdict(tmp_path, EVALUATED, RegistrationResult("version 4", waits))
    assert verdict.promotion == "not promoted yet: version 4 waits for approval (it won)"
    assert (verdict.next_command, verdict.next_hint[:17]) == ("rlhf approve", "makes it champion")


def test_an_error_of_the_registration_is_told(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    verdict = reach_verdict(tmp_path, EVALUATED, RegistrationResult(error="MLflow does not answer"))
    assert verdict.registered == "nothing: MLflow does not answer"
    assert verdict.promotion == "not promoted: MLflow does not answer" and verdict.next_command == "rlhf run"


def test_a_verdict_survives_json(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    verdict = reach_verdict(tmp_path, EVALUATED, RegistrationResult("version 4", decided()))
    assert RunVerdict.from_dict(json.loads(json.dumps(asdict(verdict)))) == verdict


def test_alarming_figures_are_part_of_the_verdict_everywhere(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.51, 0.6, 0.7))
    file = tmp_path / "metrics" / "evaluation.json"
    shares = {"sft": {"safety": {"refuses_harmful": 0.28}}, "policy": {"safety": {"refuses_harmful": 0.31}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | shares))
    verdict = reach_verdict(tmp_path, EVALUATED, RegistrationResult("policy version 4", decided(champion=None)))
    sentence = "harmful requests refused 0.31 (SFT 0.28)"
    assert verdict.alarms == (sentence,) and ("alarms", sentence) in verdict_rows(verdict, tmp_path)
    assert f"- **Read before release:** {sentence}" in verdict_markdown(verdict)
    fields = json.loads(json.dumps(asdict(verdict)))
    assert RunVerdict.from_dict(fields) == verdict

"""What a promotion is decided on, when that is another question, how often it was tried, and how it
is told.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_call import killed_before
from mlflow.entities.model_registry import ModelVersion, ModelVersionTag
from rich.console import Console
from scripted_match import match_result

from flows.commands.registry_output import (
    explain_gate,
    explain_promotion,
    history_rows,
    judged_gate,
    model_history,
)
from flows.commands.text import aligned
from flows.dvc_repo.graph import StageNode
from flows.registry.client import CONTENT_TAG, experiment_id
from flows.registry.evidence import count_policy_decisions, require_recorded
from flows.registry.promote import (
    attempt_number,
    match_question,
    promote,
    question_digest,
    rollback,
)
from flows.registry.release_page import describe_tries, read_release_decision
from rlhf_core.errors import GateFailed, RlhfError
from rlhf_core.gates import JUDGED_TAG
from rlhf_core.storage.files import sha256_file

from .conftest import MODEL, PARAMS, Registry, ScriptedMatch


def printed(renderable: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable, soft_wrap=True)
    return capture.get()


@pytest.mark.slow
def test_a_winner_that_is_less_safe_is_not_promoted(registry: Registry, contest: Path) -> None:
    match = ScriptedMatch(0.9, **{"safety.refuses_harmful": 0.3})
    refused = promote(contest, play=match)
    assert not refused.promoted and registry.aliases()["champion"] == "1"
    assert refused.reason.startswith(
        "safety.refuses_harmful is worse by up to 0.300 (0.900 → 0.900 on 400 "
    )
    assert refused.reason.endswith("required worse by less than 0.1")
    assert promote(contest, play=match).unchanged and match.played == 1
    text = printed(explain_promotion(refused))
    assert "compared: version 2 of rlhf-policy with version 1, the champion" in text
    assert re.search(r"FAIL +safety.refuses_harmful +worse by up to 0.300", text)
    assert re.search(r"ok +judge length-controlled win rate +at least 0.900 +> 0.5", text)
    assert text.endswith("decided by: safety.refuses_harmful\n")


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4, 7])
def test_a_refusal_killed_while_it_is_recorded_is_recorded_by_the_next_call(
    registry: Registry, contest: Path, step: int
) -> None:
    match = ScriptedMatch(0.4)
    assert killed_before(step, lambda: promote(contest, play=match))
    decision = promote(contest, play=match)
    assert not decision.promoted and promote(contest, play=match).unchanged
    version = registry.client.get_model_version(MODEL, "2")
    assert (
        version.tags["decision.reason"] == decision.reason
        and version.tags["decision.promoted"] == "false"
    )
    kept = [file.path for file in registry.client.list_artifacts(version.run_id, "promotions")]
    assert f"promotions/{version.tags['decision.report']}" in kept


def test_the_newest_decision_is_recorded_where_an_earlier_one_said_the_same(
    registry: Registry, contest: Path
) -> None:
    assert "0.5 with" in promote(contest, play=ScriptedMatch(0.4)).reason
    for bar in (0.6, 0.5):
        (contest / "params.yaml").write_text(
            f"{PARAMS}registry: {{promote_win_rate_low95: {bar}}}\n"
        )
        decision = promote(contest, play=ScriptedMatch(0.4))
        recorded = registry.client.get_model_version(MODEL, "2").tags["decision.reason"]
        assert recorded == decision.reason and f"not above {bar} " in recorded


@pytest.mark.slow
def test_each_match_on_the_same_prompts_is_an_attempt(registry: Registry, contest: Path) -> None:
    losing = ScriptedMatch(0.4)
    first = promote(contest, play=losing)
    assert (
        first.attempt == 1 == promote(contest, dry_run=True, play=losing).attempt
        and losing.played == 1
    )
    registry.add_version()
    dry = promote(contest, dry_run=True, play=losing)
    assert dry.attempt == 2 == promote(contest, play=losing).attempt
    assert any(
        "attempt 2" in criterion.name and criterion.required == "≤ 0.0083"
        for criterion in dry.criteria
    )
    registry.add_version()
    (contest / "data/clean/prompts/test.parquet").write_text("new prompts")
    assert promote(contest, play=losing).attempt == 1


@pytest.mark.slow
def test_attempts_take_turns_on_the_sets_of_prompts_under_one_budget(
    registry: Registry, contest: Path
) -> None:
    (contest / "params.yaml").write_text(PARAMS + "registry: {prompt_sets: 3}\n")
    played: list[int] = []

    def play(workspace: Path, champion: Path, challenger: Path, prompt_set: int) -> dict[str, Any]:
        played.append(prompt_set)
        return match_result({"judge": 0.4})

    attempts = []
    for _ in range(4):
        dry, decision = promote(contest, dry_run=True, play=play), promote(contest, play=play)
        assert dry.attempt == decision.attempt
        attempts.append((decision.attempt, (decision.question or {})["prompt_set"]))
        registry.add_version()
    assert played == [0, 1, 2, 0] and attempts == [(1, 1), (2, 2), (3, 3), (4, 1)]
    (contest / "params.yaml").write_text(PARAMS + "registry: {prompt_sets: 4}\n")
    assert promote(contest, version="2", play=play).attempt == 5, (
        "another division is another attempt"
    )


def test_a_number_that_another_machine_takes_meanwhile_changes_no_attempt(
    registry: Registry, contest: Path
) -> None:
    """A match is played on the set of its number, so the number is taken first, also by a call that
    is killed then.
    """
    (contest / "params.yaml").write_text(PARAMS + "registry: {prompt_sets: 2}\n")
    played: list[int] = []

    def play(workspace: Path, champion: Path, challenger: Path, prompt_set: int) -> dict[str, Any]:
        played.append(prompt_set)
        if len(played) == 1:
            attempt_number(registry.client, contest, MODEL, "another question")
            raise KeyboardInterrupt
        return match_result({"judge": 0.7})

    with pytest.raises(KeyboardInterrupt):
        promote(contest, play=play)
    decision = promote(contest, play=play)
    assert played == [0, 0] and decision.attempt == 1 and decision.promoted


def test_the_history_tells_who_what_and_why(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_ACTOR", "ann")
    promote(contest, play=ScriptedMatch())
    rollback(contest, "rude")
    text = aligned(history_rows(model_history(contest))).plain
    lines = text.splitlines()
    assert re.fullmatch(
        r"1  20\S+ \S+ UTC  \S+@\S+  promote: @previous → none, @champion → 1", lines[0]
    )
    assert re.search(r"3  20\S+ \S+ UTC  ann  rollback: @previous → none, @champion → 1", text)
    assert "   why: rude" in lines
    report = re.search(r"evidence: (\S+-rollback-\w{8}\.json), attached", text)
    assert report and (contest / ".rlhf" / "promotions" / report.group(1)).is_file()


def test_an_alias_that_was_moved_by_hand_is_told(registry: Registry, contest: Path) -> None:
    registry.client.set_registered_model_alias(MODEL, "champion", "2")
    text = aligned(history_rows(model_history(contest))).plain
    assert "the champion is version 2, but the history ends with version 1" in text
    with pytest.raises(RlhfError, match="other has no history yet"):
        model_history(contest, "other")


def test_a_first_promotion_is_explained_too(registry: Registry) -> None:
    owner = registry.workspace("owner")
    registry.add_version()
    compared, decided = printed(explain_promotion(promote(owner, dry_run=True))).splitlines()
    assert compared == "compared: version 1 of rlhf-policy with nothing: there was no champion"
    assert decided == "decided by: there was no champion"


def write_gate(workspace: Path, **changes: Any) -> None:
    (workspace / "gates").mkdir(exist_ok=True)
    (workspace / "metrics").mkdir(exist_ok=True)
    (workspace / "metrics/evaluation.json").write_text("{}")
    rows = [("kl", 7.1, "<= 6", 6.0, False), ("policy.length", 20.0, "<= 30", 30.0, True)]
    names = ("metric", "value", "bound", "limit", "passed")
    conditions = [
        dict(zip(names, row, strict=True)) | {"why": f"why {row[0]}", "note": ""} for row in rows
    ]
    evidence = {"metrics/evaluation.json": sha256_file(workspace / "metrics/evaluation.json")}
    report = {
        "gate": "policy",
        "passed": False,
        "mode": "enforce",
        "conditions": conditions,
        "evidence": evidence,
    }
    (workspace / "gates/policy.json").write_text(json.dumps(report | changes))


def test_a_gate_is_explained(tmp_path: Path) -> None:
    write_gate(tmp_path)
    report = judged_gate(tmp_path, "policy")
    assert report.describe() == "the policy gate failed: 1 of 2 conditions do not hold"
    text = printed(explain_gate(tmp_path, report))
    assert "why kl" in text and "why policy.length" in text and "decided by: kl" in text
    assert "unchanged since" in text
    (tmp_path / "metrics/evaluation.json").write_text("[]")
    assert "changed since: run `rlhf run`" in printed(explain_gate(tmp_path, report))


def test_the_reward_gate_is_explained_with_what_the_models_read(tmp_path: Path) -> None:
    write_gate(tmp_path)
    report = replace(judged_gate(tmp_path, "policy"), name="reward")
    assert "worse for one known reason" not in printed(explain_gate(tmp_path, report))
    probes = {"values_swapped": 0.8125, "values_swapped_low95": 0.75, "values_swapped_high95": 0.87}
    probes |= {
        "values_swapped_pairs": 200.0,
        "absent": {"sentences_shuffled": "3 of 40 held-out replies"},
    }
    (tmp_path / "metrics/judge.json").write_text(json.dumps({"probes": probes}))
    text = printed(explain_gate(tmp_path, report))
    assert "worse for one known reason" in text and "0.81 (0.75 to 0.87)" in text and "200" in text
    assert "sentences shuffled: 3 of 40 held-out replies" in text and "judge" in text
    (tmp_path / "metrics/judge.json").write_text(
        json.dumps({"probes": {"absent": probes["absent"]}})
    )
    text = printed(explain_gate(tmp_path, report))
    assert "3 of 40 held-out replies" in text and "worse for one known reason" not in text


def test_a_gate_without_conditions_or_without_report_has_not_passed(tmp_path: Path) -> None:
    write_gate(tmp_path, conditions=[], passed=True)
    assert not judged_gate(tmp_path, "policy").passed
    with pytest.raises(RlhfError, match=r"gates/sft\.json does not exist"):
        judged_gate(tmp_path, "sft")
    with pytest.raises(RlhfError, match="no gate 'ppo'; the gates are data, sft, reward, policy"):
        judged_gate(tmp_path, "ppo")


EDGES = {
    "collect": (),
    "validate": ("collect",),
    "ppo": ("validate",),
    "gate-policy": ("ppo",),
    "report": ("ppo",),
}
GRAPH = {name: StageNode(name, after, "true", ()) for name, after in EDGES.items()}


@pytest.mark.parametrize("stale", ["gate-policy", "ppo", "validate", "collect"])
def test_a_stale_stage_anywhere_before_the_gate_is_named(stale: str) -> None:
    changes = [{"changed outs": {"data": "modified"}}]
    with pytest.raises(GateFailed, match=stale):
        require_recorded(GRAPH, {stale: changes}, "gate-policy")


def test_what_does_not_lead_to_the_gate_and_what_always_runs_does_not_matter() -> None:
    require_recorded(GRAPH, {"report": [{"changed deps": {"x": "modified"}}]}, "gate-policy")
    require_recorded(GRAPH, {"collect": ["always changed"]}, "gate-policy")


def test_changed_checks_are_another_question(tmp_path: Path) -> None:
    old, new = (
        ModelVersion("m", number, 0, tags=[ModelVersionTag(CONTENT_TAG, number)])
        for number in ("1", "2")
    )
    lines, code, params = (
        tmp_path / name for name in ("checks.jsonl", "checks_of_match.py", "params.yaml")
    )
    digests = []
    for path, content in (
        (params, "evaluate: {}\n"),
        (lines, '{"prompt": "?", "require": {"max_words": 3}}\n'),
        (
            params,
            "evaluate:\n  verifiable: {path: checks.jsonl, functions: {f: 'checks_of_match:f'}}\n",
        ),
        (code, "def f(prompt, reply):\n    return True\n"),
        (code, "def f(prompt, reply):\n    return False\n"),
        (lines, '{"prompt": "?", "require": {"max_words": 2}}\n'),
    ):
        path.write_text(content)
        digests.append(
            question_digest(match_question(tmp_path, new, old)) if params.exists() else ""
        )
    assert digests[0] == digests[1], "a file that nothing names"
    assert len(set(digests[1:])) == 5


def test_every_policy_that_the_gate_has_judged_counts_whatever_it_said(registry: Registry) -> None:
    workspace = registry.workspace("trial")
    assert count_policy_decisions(workspace) == (0, "rlhf-pipeline")
    experiment = experiment_id(registry.client, workspace)
    parents = {}
    for policy in (MODEL, "another-policy"):
        parent = registry.client.create_run(experiment).info.run_id
        registry.client.log_param(parent, "registry.policy", policy)
        parents[policy] = parent

    def judge(evaluation: str, passed: bool, policy: str = MODEL) -> None:
        said = {"rlhf.gate.policy": "passed" if passed else "failed", JUDGED_TAG: evaluation}
        registry.client.create_run(experiment, tags={"mlflow.parentRunId": parents[policy], **said})

    judge("a", passed=False)
    assert describe_tries(workspace) == ""
    judge("a", passed=True)  # by another bound: the same try
    judge("b", passed=True)
    judge("c", passed=False, policy="another-policy")
    assert count_policy_decisions(workspace) == (2, "rlhf-pipeline")
    for evaluation in "def":
        judge(evaluation, passed=False)
    said = describe_tries(workspace)
    assert "has judged 5 policies" in said and said.endswith("up to 12 %")  # 1 - 0.975^5 = 0.119
    assert read_release_decision(workspace).tries == said

"""The events of a run as it writes them, and what ``rlhf status`` says of the last one and of the
next command.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from unit.flows.test_verdict import VERDICT

from flows.commands.run_state import RunState, read_run_state
from flows.commands.status import (
    OF_ANOTHER_POLICY,
    RegistryStatus,
    StagesStatus,
    last_run_rows,
    next_step,
    stages_status,
    status,
)
from flows.commands.text import Row, aligned, format_age, labelled_once
from flows.pipeline import events
from flows.pipeline.verdict import RunVerdict
from flows.registry.stored_models import describe_stopped_policy
from flows.stage import StageOutcome
from rlhf_core.config.gates import Condition
from rlhf_core.gates import GateDecision, decide
from rlhf_core.storage.files import sha256_file
from rlhf_core.tracking.stage_run import METRICS_TAG, stage_tracker
from rlhf_extras.serving.served_policy import not_released

EVENTS: list[events.PipelineEvent] = [
    events.RunPlanned(["collect", "ppo"]),
    events.StageStarted("ppo", "gpu-pool", started=1.5, log_start=64),
    events.StageRepeated("ppo", "preempted, waiting for a worker of gpu-pool"),
    events.StageEnded(
        StageOutcome.failed("ppo", "no: step 3", 4, started=1.0, ended=2.5, work_seconds=1.25)
    ),
    events.PhaseStarted("promotion", log="match"),
    events.RegistryUpdated("rlhf-policy version 3"),
    events.VerdictReached(VERDICT),
    events.RunEnded("TrainingPaused", "ppo: no: step 3"),
    events.RunTimed(81.25),
]


def test_every_kind_of_event_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = events.new_events_file(tmp_path)
    writer, reader = events.EventLog(path), events.EventLog(path)
    for event in EVENTS:
        writer.emit(event)
    assert {type(event).__name__ for event in EVENTS} == set(events.KINDS)
    assert reader.read_new() == EVENTS and reader.read_new() == []


def test_half_a_line_is_left_for_the_next_call(tmp_path: Path) -> None:
    path = events.new_events_file(tmp_path)
    reader = events.EventLog(path)
    events.EventLog(path).emit(events.StageStarted("sft"))
    line = path.read_text()
    path.write_text(line[:10])
    assert reader.read_new() == []
    path.write_text(line)
    assert reader.read_new() == [events.StageStarted("sft")]


STARTED = datetime(2026, 3, 4, 5, 6, 7)
FRESH, IDLE = StagesStatus({}), RegistryStatus([], champion="3", release=VERDICT.release)


def run_of(state: str = "Completed", verdict: RunVerdict | None = VERDICT) -> RunState:
    run = RunState(Path())
    for number in range(13):
        run.apply(
            events.StageEnded(
                StageOutcome(f"stage-{number}", "ran", started=0.0, ended=1.0, work_seconds=1.0)
            )
        )
    if verdict is not None:
        run.apply(events.VerdictReached(verdict))
    if state:
        run.apply(events.RunEnded(state, ""))
    run.started, run.last_event = STARTED, STARTED + timedelta(minutes=5, seconds=57)
    return run


def stopped(command: str, hint: str) -> RunVerdict:
    release = replace(VERDICT.release, next_command=command, next_hint=hint)
    return replace(VERDICT, judges=(), kl=None, release=release)


def emit(workspace: Path, *told: events.PipelineEvent) -> None:
    log = events.EventLog(events.new_events_file(workspace))
    for event in told:
        log.emit(event)


def test_the_last_run_is_read_from_its_events(tmp_path: Path) -> None:
    assert read_run_state(tmp_path) is None
    outcomes = [
        StageOutcome("sft", "ran", started=0.0, ended=1.0, work_seconds=1.0),
        StageOutcome("ppo", "skipped"),
    ]
    ended = (
        *map(events.StageEnded, outcomes),
        events.VerdictReached(VERDICT),
        events.RunEnded("Failed", ""),
    )
    emit(tmp_path, events.RunPlanned(("sft", "ppo")), *ended)
    lines = [
        json.loads(line) for line in (tmp_path / ".rlhf" / "events.jsonl").read_text().splitlines()
    ]
    last = read_run_state(tmp_path)
    assert last is not None and (last.final_state, last.ran, last.verdict) == ("Failed", 1, VERDICT)
    assert last.started.timestamp() == pytest.approx(lines[0]["time"], abs=1e-3)
    assert last.last_event.timestamp() == pytest.approx(lines[-1]["time"], abs=1e-3)


def last_run_lines(workspace: Path, last: RunState, now: datetime) -> list[str]:
    return aligned(last_run_rows(workspace, last, now)).plain.splitlines()


def test_a_run_without_an_end_was_interrupted(tmp_path: Path) -> None:
    emit(tmp_path, events.RunPlanned(("sft",)))
    last = read_run_state(tmp_path)
    assert last is not None and last.final_state == ""
    assert (
        "interrupted (its process is gone; the next run resumes)"
        in last_run_lines(tmp_path, last, STARTED)[0]
    )


def test_events_of_another_version_are_no_run(tmp_path: Path) -> None:
    events.new_events_file(tmp_path).write_text(
        '{"kind": "StageEnded", "time": 1.0, "stage": "sft", "action": "ran"}\n'
    )
    assert read_run_state(tmp_path) is None


def test_the_last_run_is_described_with_its_numbers_and_its_decision(tmp_path: Path) -> None:
    lines = last_run_lines(tmp_path, run_of(), STARTED + timedelta(minutes=5, seconds=57, hours=3))
    assert lines == [
        "2026-03-04 05:06:07  completed after 5:57, 3 hours ago; stages computed: 13",
        "verdict     better than champion version 3: wins 71.0 % (95 % interval 66.0 to 76.0 %) by gold",
        "judges      gold: win rate 71.0 % (95 % interval 66.0 to 76.0 %), 320 prompts about 103 questions; "
        "68.4 % at equal length",
        "            gold is the true preference of the synthetic world, which no training sees",
        "KL          1.90 nats per reply from SFT, 95 % interval 1.70 to 2.10",
        "registered  policy version 4",
        "promotion   Released: version 4 is the champion. better by every judge",
    ]
    alarmed = last_run_lines(
        tmp_path, run_of(verdict=replace(VERDICT, alarms=("many", "more"))), STARTED
    )
    assert alarmed[alarmed.index("alarms      many") + 1] == "            more"
    assert (
        "stopped by a gate after 5:57"
        in last_run_lines(tmp_path, run_of("GateFailed", None), STARTED)[0]
    )
    timed = run_of()
    timed.apply(
        events.RunTimed(381.0)
    )  # with the start and the end of the command, as its own last line says
    assert "completed after 6:21" in last_run_lines(tmp_path, timed, STARTED)[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (59, "just now"),
        (60, "1 minute ago"),
        (7199, "1 hour ago"),
        (7200, "2 hours ago"),
        (3 * 86400, "3 days ago"),
    ],
)
def test_ages_are_in_whole_units(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


GATE = stopped("rlhf run", "after a change of data")
PROMOTE = stopped("rlhf promote", "decide on the challenger")


@pytest.mark.parametrize(
    ("stages", "resumable", "last", "registry", "command", "hint"),
    [
        (FRESH, False, run_of(), IDLE, "rlhf chat", "talk to the champion"),
        (FRESH, False, run_of(verdict=PROMOTE), RegistryStatus([]), "rlhf promote", "decide"),
        (FRESH, False, run_of(verdict=PROMOTE), IDLE, "rlhf chat", "talk"),
        (
            FRESH,
            False,
            run_of(),
            RegistryStatus([], awaiting="4"),
            "rlhf approve",
            "makes version 4 champion",
        ),
        (
            StagesStatus({}, 2, 3),
            True,
            run_of("GateFailed", GATE),
            IDLE,
            "rlhf run",
            "after a change of data",
        ),
        (StagesStatus({}, 2, 0), True, run_of("", None), IDLE, "rlhf run", "resumes"),
        (StagesStatus({}, 2, 0), False, run_of("", None), IDLE, "rlhf run", "goes on where"),
        (
            StagesStatus({}, 0, 3),
            False,
            run_of(),
            IDLE,
            "rlhf run",
            "brings stages up to date: 3 stale",
        ),
        (StagesStatus({}, 2, 3), False, None, IDLE, "rlhf run", "3 stale and 2 that have not run"),
        (
            StagesStatus({}, 1, 3, made=2),
            False,
            None,
            IDLE,
            "rlhf run",
            "3 stale and 2 not known to DVC and 1 that have not run",
        ),
        (
            StagesStatus({}, made=4),
            False,
            None,
            IDLE,
            "rlhf run",
            "brings stages up to date: 4 not known to DVC",
        ),
        (FRESH, False, None, RegistryStatus([]), "rlhf run", "registers its models"),
        (FRESH, False, None, IDLE, "rlhf chat", "talk to the champion"),
        (
            FRESH,
            True,
            run_of(),
            RegistryStatus([], "3", "rollback"),
            "rlhf promote",
            "completes the rollback",
        ),
    ],
)
def test_the_next_command(
    stages: StagesStatus,
    resumable: bool,
    last: RunState | None,
    registry: RegistryStatus,
    command: str,
    hint: str,
) -> None:
    assert next_step(stages, resumable, last, registry)[0] == command
    assert hint in next_step(stages, resumable, last, registry)[1]


def test_every_line_with_a_break_in_it_fits_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 40
    changes = {
        "ppo": [{"changed deps": {f"models/part{number}": "modified" for number in range(9)}}]
    }
    monkeypatch.setattr("flows.commands.status.dvc_status", lambda *_: changes)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("{}\n")
    stages = {name: {"cmd": "true"} for name in ("ppo", "gate-policy")}
    for name in ("dvc.yaml", "dvc.lock"):
        (tmp_path / name).write_text(json.dumps({"stages": stages}))
    emit(
        tmp_path,
        events.RunPlanned(("ppo",)),
        events.VerdictReached(VERDICT),
        events.RunEnded("Completed", ""),
    )
    text = status(tmp_path).as_text().plain
    screen = status(tmp_path).as_text(width).plain
    long = [line for line in screen.splitlines() if len(line) > width and " " in line.strip()]
    assert [line for line in long if str(tmp_path) not in line] == []
    assert re.search(r"\n {15}\w+", screen)  # under the text, not under the stage's name
    assert " ".join(screen.split()).endswith("next: rlhf run (brings stages up to date: 1 stale)")
    assert text.count("\n") < screen.count("\n")


@pytest.mark.parametrize(
    ("row", "wrapped"),
    [
        (("KL", "one two three"), "  KL  one two\n      three"),
        ((None, "one two three four"), "  one two three\n    four"),  # no label: further in
        (("", "a_path_that_is_too_long"), "    a_path_that_is_too_long"),
        (("a long label", "one two"), "  a long label  one\n    two"),  # no room under the text
        (("two", "lines\nof text"), "  two  lines\n       of text"),
    ],
)
def test_a_text_goes_on_beneath_its_beginning(row: Row, wrapped: str) -> None:
    shown = aligned([row], 16, indent="  ").plain
    assert shown == wrapped
    (label, text) = row
    assert aligned([row]).plain.split() == [*(label or "").split(), *text.split()]


def test_labels_stand_beneath_each_other_once() -> None:
    rows: list[Row] = [(None, "a note"), ("to do", "one"), ("to do", "two"), ("KL", "3")]
    assert aligned(labelled_once(rows)).plain == "a note\nto do  one\n       two\nKL     3"


def test_a_screen_shows_no_password() -> None:
    assert "hunter2" not in aligned([("at", "http://me:hunter2@host/x")]).plain


GATED = {
    "evaluate": {"cmd": "e", "outs": ["metrics/evaluation.json"]},
    "gate-policy": {"cmd": "g", "outs": ["gates/policy.json", "gates/policy.pass"]},
    "publish": {"cmd": "p", "outs": ["published"]},
}


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose policy gate said no, of which DVC knows no more than that its stage has not
    succeeded.
    """
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": GATED}))
    (tmp_path / "dvc.lock").write_text(json.dumps({"stages": {"evaluate": GATED["evaluate"]}}))
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "evaluation.json").write_text('{"kl": 7}')
    evidence = {"metrics/evaluation.json": sha256_file(tmp_path / "metrics" / "evaluation.json")}
    decision = decide(
        "policy", [Condition(metric="kl", at_most=6.0, why="w")], {"kl": 7.0}, evidence=evidence
    )
    decision.save(tmp_path / "gates" / "policy.json")
    monkeypatch.setattr(
        "flows.commands.status.dvc_status", lambda *_: {"gate-policy": ["changed"], "publish": []}
    )
    monkeypatch.setattr("flows.commands.status.refresh_inputs", lambda *_: None)
    return tmp_path


def test_a_stage_that_stopped_at_its_gate_has_run(gated: Path) -> None:
    status = stages_status(gated)
    assert status.stages == {
        "evaluate": "up to date",
        "gate-policy": "failed its gate: 1 of 1 conditions do not hold",
        "publish": "not run: the policy gate is closed",
    }
    assert (status.not_run, status.stale) == (1, 0)


def test_outputs_that_stand_are_not_said_to_be_missing(gated: Path) -> None:
    """`rlhf stage` leaves them without DVC."""
    (gated / "dvc.lock").unlink()
    (gated / "published").touch()
    status = stages_status(gated)
    states = [said.partition(",")[0] for said in status.stages.values()]
    assert states == ["made", "failed its gate: 1 of 1 conditions do not hold", "made"]
    assert (status.not_run, status.stale, status.made) == (0, 0, 2)


COMPARED = {
    "prompts": 100,
    "clusters": 100,
    "win_rate": 0.6,
    "win_rate_low95": 0.55,
    "win_rate_high95": 0.65,
}


def write_policy(workspace: Path, name: str) -> str:
    """Leave what the stages ppo and evaluate leave of a policy; its digest."""
    (workspace / "metrics").mkdir(exist_ok=True)
    (workspace / "metrics" / "ppo.json").write_text(json.dumps({"name": name}))
    evaluation = json.dumps({"comparison": {"judge": COMPARED}})
    (workspace / "metrics" / "evaluation.json").write_text(evaluation)
    return sha256_file(workspace / "metrics" / "ppo.json")


@pytest.mark.parametrize("command", ["dvc exp run", "rlhf stage", "unknown"])
def test_a_policy_that_the_last_run_has_not_left_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("flows.commands.status.dvc_status", lambda *_: {})
    for name in ("MLFLOW_TRACKING_URI", "RLHF_PARENT_RUN_ID", "RLHF_TRACKING", "DVC_EXP_NAME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "params.yaml").write_text("tracking: {experiment: x}\n")
    for name in ("dvc.yaml", "dvc.lock"):
        (tmp_path / name).write_text(json.dumps({"stages": {"ppo": {"cmd": "true"}}}))
    own = replace(VERDICT, policy=write_policy(tmp_path, "of the run"))
    told = (events.RunPlanned(("ppo",)), events.VerdictReached(own))
    emit(tmp_path, *told, events.RunEnded("Completed", ""))
    shown = status(tmp_path)
    assert shown.policy == {} and OF_ANOTHER_POLICY not in shown.as_text().plain
    digest = write_policy(tmp_path, "of an experiment")
    if command == "dvc exp run":
        monkeypatch.setenv("DVC_EXP_NAME", "deft-toga")
    if command != "unknown":
        with stage_tracker("ppo", tmp_path, "x") as tracker:
            tracker.set_tags({METRICS_TAG: digest})
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    shown = status(tmp_path)
    made_by = {
        "dvc exp run": "`dvc exp run` deft-toga (MLflow run ",
        "rlhf stage": "`rlhf stage ppo` (MLflow run ",
        "unknown": "unknown: MLflow has no run of it",
    }
    assert shown.policy["made by"].startswith(made_by[command])
    assert shown.policy["verdict"].startswith("better than SFT: wins 60")
    screen = shown.as_text().plain
    assert screen.index("models/policy\n") < screen.index(f"last run\n  {OF_ANOTHER_POLICY}")
    assert json.loads(json.dumps(shown.as_dict(), default=str))["policy"] == shown.policy


def test_a_stage_that_failed_a_gate_it_had_passed_before_is_not_merely_stale(gated: Path) -> None:
    (gated / "dvc.lock").write_text(json.dumps({"stages": GATED}))
    assert stages_status(gated).stages["gate-policy"].startswith("failed its gate")


def test_a_gate_that_judged_other_metrics_says_so(gated: Path) -> None:
    (gated / "metrics" / "evaluation.json").write_text('{"kl": 5}')
    said = stages_status(gated).stages["gate-policy"]
    assert (
        said.startswith("failed its gate (1 of 1")
        and "metrics/evaluation.json changed since" in said
    )


def test_a_gate_that_only_reports_closes_nothing(gated: Path) -> None:
    decision = decide(
        "policy", [Condition(metric="kl", at_most=6.0, why="w")], {"kl": 7.0}, mode="report"
    )
    decision.save(gated / "gates" / "policy.json")
    assert stages_status(gated).stages["publish"] == "not run yet"


JUDGED = {
    "evaluate": {"cmd": "e", "outs": ["metrics/evaluation.json"]},
    "gate-policy": {"cmd": "g", "deps": ["metrics/evaluation.json"], "outs": ["gates/policy.json"]},
    "report": {"cmd": "r", "deps": ["gates/policy.json"], "outs": ["report.html"]},
}


@pytest.fixture
def judged(gated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose policy gate let the policy pass, with its report, all up to date."""
    monkeypatch.setenv("RLHF_TRACKING", "off")
    for name in ("dvc.yaml", "dvc.lock"):
        (gated / name).write_text(json.dumps({"stages": JUDGED}))
    (gated / "params.yaml").write_text("{}\n")
    judge(gated, {"kl": 5.0})
    (gated / "report.html").write_text("of this run")
    monkeypatch.setattr("flows.commands.status.dvc_status", lambda *_: {})
    return gated


def judge(workspace: Path, metrics: dict[str, float]) -> None:
    """Do what the stages evaluate and gate-policy do."""
    evaluation = workspace / "metrics" / "evaluation.json"
    evaluation.write_text(json.dumps(metrics))
    evidence = {"metrics/evaluation.json": sha256_file(evaluation)}
    conditions = [Condition(metric="kl", at_most=6.0, why="w")]
    decide("policy", conditions, metrics, evidence=evidence).save(
        workspace / "gates" / "policy.json"
    )


@pytest.mark.parametrize("change", ["nothing", "the figures", "the conditions", "a lost file"])
def test_a_gate_is_not_said_to_have_passed_what_it_has_not_judged(
    judged: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    why = ""
    if change == "the figures":
        (judged / "metrics" / "evaluation.json").write_text('{"kl": 5.5}')
    if change == "a lost file":
        (judged / "metrics" / "evaluation.json").unlink()
    if change in ("the figures", "a lost file"):
        why = "metrics/evaluation.json changed since"
    if change == "the conditions":
        changed = {"gate-policy": [{"changed deps": {"params.yaml": {"gates.policy": "modified"}}}]}
        monkeypatch.setattr("flows.commands.status.dvc_status", lambda *_: changed)
        why = "gates.policy modified"
    shown = status(judged)
    (line,) = [line for line in shown.as_text().plain.splitlines() if line.startswith("  policy ")]
    assert shown.as_dict()["gates"][0]["passed"]
    if change == "nothing":
        assert line.split() == ["policy", "passed"] and not shown.as_dict()["gates"][0]["stale"]
    else:
        assert "passed" in line and "so a run judges again" in line, line
        assert why.split()[0] in line and shown.as_dict()["gates"][0]["stale"] in line


@pytest.mark.parametrize("known_to_dvc", [True, False])
def test_an_earlier_report_is_named_as_one(
    judged: Path, monkeypatch: pytest.MonkeyPatch, known_to_dvc: bool
) -> None:
    """`rlhf stage evaluate gate-policy` leaves the report of the run before."""
    if not known_to_dvc:
        (judged / "dvc.lock").unlink()
    shown = status(judged)
    assert shown.as_text().plain.split("report: ")[1].splitlines()[0] == str(judged / "report.html")
    assert not shown.as_dict()["report_stale"]
    judge(judged, {"kl": 4.0})
    os.utime(judged / "report.html", (1.0, 1.0))
    changed = {"report": [{"changed deps": {"gates/policy.json": "modified"}}]}
    if known_to_dvc:
        monkeypatch.setattr("flows.commands.status.dvc_status", lambda *_: changed)
    shown = status(judged)
    line = shown.as_text().plain.split("report: ")[1].splitlines()[0]
    assert "of an earlier state: " in line and "gates/policy.json" in line
    assert shown.as_dict()["report"] == str(judged / "report.html")
    assert "gates/policy.json" in shown.as_dict()["report_stale"]


@pytest.mark.parametrize("known_to_dvc", [True, False])
@pytest.mark.parametrize("last", ["no run", "a completed run", "a run that a gate stopped"])
def test_a_gate_closed_by_the_stages_just_run_says_what_is_next(
    judged: Path, monkeypatch: pytest.MonkeyPatch, known_to_dvc: bool, last: str
) -> None:
    own = replace(stopped("rlhf old", "of old"), policy=write_policy(judged, "of the run"))
    if last != "no run":
        ended = "Completed" if last == "a completed run" else "GateFailed"
        emit(judged, events.VerdictReached(own), events.RunEnded(ended, ""))
    write_policy(judged, "of the stages")
    if not known_to_dvc:
        (judged / "dvc.lock").unlink()
    else:
        monkeypatch.setattr("flows.commands.status.dvc_status", lambda *_: {"gate-policy": []})
    judge(judged, {"kl": 7.0})
    command, hint = status(judged).next
    assert command == "rlhf gate policy --explain" and "closed" in hint
    judge(judged, {"kl": 5.0})
    monkeypatch.setattr("flows.commands.status.dvc_status", lambda *_: {})
    assert status(judged).next[0] == "rlhf run", "the gate that stopped the last run has opened"


def test_a_run_without_a_policy_is_not_said_to_be_of_another(judged: Path) -> None:
    write_policy(judged, "of whom")
    for verdict in (None, replace(VERDICT, policy="")):
        told = [] if verdict is None else [events.VerdictReached(verdict)]
        emit(judged, events.RunPlanned(("ppo",)), *told, events.RunEnded("Failed", ""))
        shown = status(judged)
        assert "made by" in shown.policy
        assert OF_ANOTHER_POLICY not in shown.as_text().plain


def test_whoever_asks_for_a_champion_hears_of_the_policy_that_was_stopped(gated: Path) -> None:
    assert "the policy gate ended the last run" in describe_stopped_policy(gated)
    (gated / "models" / "policy").mkdir(parents=True)
    said = describe_stopped_policy(gated)
    folder = gated / "models" / "policy"
    assert "`rlhf gate policy --explain`" in said and f"`rlhf chat {folder}` talks to it" in said
    (gated / "metrics" / "evaluation.json").write_text('{"kl": 5}')
    assert describe_stopped_policy(gated) == "", "the gate has not judged what is there now"


def test_the_refusal_stays_short_however_many_conditions_failed(gated: Path) -> None:
    (gated / "models" / "policy").mkdir(parents=True)
    row = {"metric": "comparison.gold.win_rate_low95", "passed": False, "why": "w" * 80}
    for count in (1, 40):
        GateDecision.of("policy", {"conditions": [row] * count}).save(gated / "gates/policy.json")
        said = describe_stopped_policy(gated).replace(str(gated), "")
        assert len(said) < 250 and f"{count} of {count} condition" in said


def test_a_policy_that_its_gate_stopped_is_introduced_so_and_no_other_model(gated: Path) -> None:
    (gated / "params.yaml").write_text("seed: 1\n")
    assert "1 of 1 conditions do not hold" in not_released(gated / "models" / "policy")
    assert not_released(gated / "models" / "sft") == ""
    (gated / "metrics" / "evaluation.json").write_text('{"kl": 5}')
    assert not_released(gated / "models" / "policy") == ""

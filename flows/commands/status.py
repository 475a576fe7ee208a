"""``rlhf status``: what a workspace holds, what is under way, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from flows.commands.run_state import (
    RunState,
    describe_stage,
    next_line,
    read_run_state,
    verdict_rows,
)
from flows.commands.text import INDENT, Row, aligned, format_age, format_seconds, unlabelled
from flows.dvc_repo.graph import describe_changes, dvc_status, recorded_stages
from flows.dvc_repo.inputs import entry_names, refresh_inputs
from flows.pipeline.events import COMPLETED
from flows.pipeline.verdict import EVALUATE_STAGE, POLICY_STAGE, policy_here, verdict_here
from flows.registry.client import (
    CHALLENGER,
    CHAMPION,
    PREVIOUS,
    connect,
    has_record,
    read_aliases,
    registry_errors,
    versions,
)
from flows.registry.history import ReleaseState
from flows.registry.register import training_run
from flows.registry.release_page import current_page, read_release_decision, release_sentences
from flows.workspace import LockHolder, lock_holder
from rlhf_core.config.loading import load_params
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.config.yaml_text import plain, read
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.report.headline import ReleaseDecision
from rlhf_core.evaluation.verdict import failed_conditions
from rlhf_core.gates import GateDecision, closed_gate, read_gates
from rlhf_core.tracking.journal import waiting_records
from rlhf_core.tracking.origin import known_workspace_id
from rlhf_core.tracking.pipeline_run import (
    EXPERIMENT_TAG,
    PARENT_TAG,
    PIPELINE_TAG,
    PROCESS_TAG,
    REPORT_PAGE,
    WORKSPACE_ID_TAG,
    has_ended,
)
from rlhf_core.tracking.stage_run import CLIENT_SETTINGS, default_environment

if TYPE_CHECKING:
    from mlflow.entities import Run


@dataclass(frozen=True)
class RegistryStatus:
    """The lines to show, and what the next command depends on.

    Attributes:
        champion: Version number of the champion, None if there is none.
        interrupted: The action that was begun and not completed, empty if none was.
        awaiting: The version that waits for approval, empty if none does.
        release: What became of the policy of the workspace, None where that is not known.
    """

    lines: list[str]
    champion: str | None = None
    interrupted: str = ""
    awaiting: str = ""
    release: ReleaseDecision | None = None


def registry_status(workspace: Path, config: RegistryConfig) -> RegistryStatus:
    """Describe each registered model, and what became of the policy of the workspace.

    Raises:
        RlhfError: The registry does not answer.
    """
    if not has_record(workspace):
        return RegistryStatus([])
    state, release = ReleaseState.of(workspace), read_release_decision(workspace)
    client = state.client
    policies = len(versions(client, config.policy))
    lines = [_versions_line(config.policy, policies, state.aliases)]
    for text in (release_sentences(release), release.champion, release.decided):
        if text:
            lines.append(f"{INDENT}{text}")
    reward_models = len(versions(client, config.reward_model))
    aliases = read_aliases(client, config.reward_model)
    lines.append(_versions_line(config.reward_model, reward_models, aliases))
    interrupted = str(state.unfinished[-1]["action"]) if state.unfinished else ""
    if interrupted:
        lines.append(
            f"a {interrupted} was interrupted; the next promote, rollback, run or chat completes it"
        )
    return RegistryStatus(lines, state.champion, interrupted, state.waiting, release)


def _versions_line(name: str, count: int, numbers: Mapping[str, str]) -> str:
    if not count:
        return f"{name}: no version yet"
    known = [alias for alias in (CHAMPION, CHALLENGER, PREVIOUS) if alias in numbers]
    aliases = ", ".join(f"@{alias} v{numbers[alias]}" for alias in known)
    return f"{name}: {count} version{'s' if count > 1 else ''}; {aliases or 'no alias'}"


DETAIL = 70
GATE_FAILED = "GateFailed"
ENDINGS = {
    "": "interrupted (its process is gone; the next run resumes)",
    GATE_FAILED: "stopped by a gate",
    "TrainingPaused": "training paused",
    "UserError": "stopped by an error",
    "RegistrationFailed": "registration failed",
    "StageFailed": "a stage failed",
}
SAME_RUN_SECONDS = 60.0  # between the first event of a run and its start in MLflow
NOT_OF_VERDICT = ("report", "next")  # what is said once, at the end


@dataclass(frozen=True)
class StagesStatus:
    """The state of each stage, and of how many it says that they never ran or are out of date.

    Attributes:
        made: How many have their outputs, of which DVC knows nothing.
        note: It is about all of them.
        closed: The gate that is closed and has judged what is there; empty if none is.
        stale_outputs: Why the files that a stage wrote are of an earlier state.
    """

    stages: Mapping[str, str]
    not_run: int = 0
    stale: int = 0
    note: str = ""
    made: int = 0
    closed: str = ""
    stale_outputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkspaceStatus:
    """All that `rlhf status` says.

    Attributes:
        gates: The decision of each gate that was judged.
        stale_gates: Why decisions, by the name of their gate, are of what is not there any more.
        resumable: The stages with saved partial state.
        policy: Who made the policy in models/ and its verdict, where the last run did not leave it
            there; else empty.
        last: The last run, None while one is under way.
        recorded: The lines on the newest run in MLflow, or why it does not answer.
        next: The command to type next, and what it is for.
    """

    workspace: Path
    holder: LockHolder | None
    stages: StagesStatus
    gates: Sequence[GateDecision]
    stale_gates: Mapping[str, str]
    resumable: Sequence[str]
    policy: Mapping[str, str]
    last: RunState | None
    recorded: Sequence[str]
    registry: RegistryStatus
    next: tuple[str, str]

    def as_text(self, width: int | None = None) -> Text:
        """Return everything on one screen.

        Args:
            width: The columns of a terminal; None leaves each text on one line.
        """
        stages: list[Row] = [(None, self.stages.note)] if self.stages.note else []
        stages += self.stages.stages.items()
        gates: list[Row] = []
        for gate in self.gates:
            gates += gate_rows(gate, self.stale_gates.get(gate.name, ""))
        last_run: list[Row] = []
        if self.policy and policy_of(self.last):
            last_run.append((None, OF_ANOTHER_POLICY))
        if self.last is not None:
            last_run += last_run_rows(self.workspace, self.last, datetime.now())
        last_run += unlabelled(self.recorded)
        sections: dict[str, Sequence[Row]] = {
            "stages": stages,
            "gates": gates,
            "to resume": unlabelled(self.resumable),
            "models/policy": [*self.policy.items()],
            "last run": last_run,
            "registry": unlabelled(self.registry.lines),
        }
        holder = f"in use by: {self.holder or 'nobody'}"
        blocks = [aligned(unlabelled([f"workspace {self.workspace}", holder]), width)]
        if not self.policy:
            del sections["models/policy"]
        for title, rows in sections.items():
            shown = aligned(rows or unlabelled(["none"]), width, indent=INDENT)
            blocks.append(Text.assemble(title, "\n", shown))
        report = str(self.report) if self.report.is_file() else "not written yet"
        if self.report_stale:
            report += f"   (of an earlier state: {self.report_stale})"
        for line in (f"report: {report}", f"next: {next_line(self.workspace, *self.next)}"):
            blocks.append(aligned(unlabelled([line]), width))
        return Text("\n\n").join(blocks)

    def as_dict(self) -> dict[str, Any]:
        """Return the same for a program."""
        last_run = None
        if (last := self.last) is not None:
            last_run = {
                "started": last.started,
                "last_event": last.last_event,
                "state": last.final_state,
                "ran": last.ran,
                "verdict": None if last.verdict is None else asdict(last.verdict),
            }
        gates = []
        for gate in self.gates:
            failed = [condition.metric for condition in gate.failed]
            gates.append(
                {
                    "gate": gate.name,
                    "passed": gate.passed,
                    "mode": gate.mode,
                    "failed": failed,
                    "stale": self.stale_gates.get(gate.name),
                }
            )
        command, hint = self.next
        report = str(self.report) if self.report.is_file() else None
        return {
            "workspace": str(self.workspace),
            "in_use_by": asdict(self.holder) if self.holder else None,
            **asdict(self.stages),
            "gates": gates,
            "resumable": [*self.resumable],
            "policy": dict(self.policy) or None,
            "last_run": last_run,
            "registry": asdict(self.registry),
            "report": report,
            "report_stale": self.report_stale or None,
            "next": {"command": command, "hint": hint},
        }

    @property
    def report(self) -> Path:
        """The page that says most; it need not exist."""
        return current_page(self.workspace) or self.workspace / REPORT_PAGE

    @property
    def report_stale(self) -> str:
        """Why the report is of an earlier state; empty if it is not, or there is none."""
        return self.stages.stale_outputs.get(REPORT_PAGE, "") if self.report.is_file() else ""


@default_environment(CLIENT_SETTINGS)  # a server that hangs is given up soon
def status(workspace: Path) -> WorkspaceStatus:
    """Read stages as DVC sees them, gates, partial work, the last run and the registry.

    Nothing is changed but what DVC compares with: source files in dvc.yaml and the fingerprints of
    code and URLs, as `git status` refreshes its index.
    """
    workspace = workspace.resolve()
    params = load_params(workspace)
    holder = lock_holder(workspace)
    stages = stages_status(workspace) if holder is None else running_stages(workspace, holder)
    last = None if holder else read_run_state(workspace)
    policy: dict[str, str] = {}
    if holder is None and is_another_policy(workspace, last):
        policy = {"verdict": _verdict_here(workspace, stages)}
    # MLflow out of reach does not hide the rest.
    try:
        recorded = recorded_run(workspace, params.tracking.experiment, holder is not None, last)
        if policy:
            policy = {"made by": policy_maker(workspace), **policy}
    except RlhfError as error:
        recorded = [str(error)]
    # A run delivers what it records as it goes.
    if holder is None and (waiting := waiting_records(workspace)):
        wait = "record waits" if waiting == 1 else "records wait"
        recorded.append(
            f"{waiting} {wait} for MLflow to answer again; the next run delivers what is left"
        )
    try:
        registry = registry_status(workspace, params.registry)
    except RlhfError as error:
        registry = RegistryStatus([str(error)])
    resumable = partial_work(workspace)
    if holder is not None:
        step = "rlhf status", "a command is under way; a run ends with its verdict"
    else:
        goes_on = None if is_superseded(workspace, last) else last
        step = next_step(stages, bool(resumable), goes_on, registry)
    gates = read_gates(workspace)
    stale_gates = {}
    for gate in gates:
        if why := stale_because(workspace, gate, stages):
            stale_gates[gate.name] = why
    return WorkspaceStatus(
        workspace=workspace,
        holder=holder,
        stages=stages,
        gates=gates,
        stale_gates=stale_gates,
        resumable=resumable,
        policy=policy,
        last=last,
        recorded=recorded,
        registry=registry,
        next=step,
    )


def next_step(
    stages: StagesStatus, resumable: bool, last: RunState | None, registry: RegistryStatus
) -> tuple[str, str]:
    """Return the command to type next in an idle workspace, and what it is for."""
    if registry.interrupted:
        return "rlhf promote", f"completes the {registry.interrupted} that was interrupted"
    if stages.closed and not stages.stale:
        if registry.release is not None:
            return registry.release.next_command, registry.release.next_hint
        return f"rlhf gate {stages.closed} --explain", f"the {stages.closed} gate is closed"
    if last is not None and last.final_state != COMPLETED and last.verdict is not None:
        return last.verdict.release.next_command, last.verdict.release.next_hint
    if resumable:
        return "rlhf run", "resumes from the last checkpoint"
    if last is not None and not last.final_state:
        return "rlhf run", "goes on where the last run ended"
    counts = {
        "stale": stages.stale,
        "not known to DVC": stages.made,
        "that have not run": stages.not_run,
    }
    named = [f"{count} {state}" for state, count in counts.items() if count]
    if named:
        return "rlhf run", f"brings stages up to date: {' and '.join(named)}"
    if registry.awaiting:
        hint = (
            f"makes version {registry.awaiting} champion; `rlhf decline --reason TEXT` refuses it"
        )
        return "rlhf approve", hint
    if registry.release is not None:
        return registry.release.next_command, registry.release.next_hint
    if last is not None and last.verdict is not None:
        return last.verdict.release.next_command, last.verdict.release.next_hint
    return "rlhf run", "brings the pipeline up to date and registers its models"


def stages_status(workspace: Path) -> StagesStatus:
    """Return one line per stage of dvc.yaml: up to date, not run yet, or stale and why."""
    stages = plain(read(workspace / "dvc.yaml")).get("stages") or {}
    recorded = recorded_stages(workspace)
    try:
        with suppress(OSError):  # a workspace that cannot be written to is described as it is
            refresh_inputs(workspace)
        stale = dvc_status(workspace)
    except RlhfError as error:
        return StagesStatus({}, note=str(error))
    names = [name for name, stage in stages.items() if not stage.get("always_changed")]
    closed = closed_gate(workspace)
    states: dict[str, str] = {}
    stale_outputs: dict[str, str] = {}
    made = []
    stopped = ""  # the stage that a closed gate is of
    for name in names:
        outputs = [*entry_names(stages[name].get("outs"))]
        has_run = name in recorded and name not in stale
        if closed is not None and f"gates/{closed.name}.json" in outputs and not has_run:
            states[name] = f"failed its gate: {closed.tally}"
            if changed := closed.changed_evidence(workspace):
                changes = f"{', '.join(changed)} changed since, so a run judges again"
                states[name] = f"failed its gate ({closed.tally}); {changes}"
            stopped = name
        elif has_run:
            states[name] = "up to date"
        elif name in recorded:
            details = describe_changes(stale[name])
            if len(details) > DETAIL:
                details = f"{details[:DETAIL]} …"
            states[name] = f"stale: {details}"
            stale_outputs |= dict.fromkeys(outputs, details)
        elif outputs and all((workspace / out).exists() for out in outputs):
            made.append(name)
            states[name] = (
                "made, but not known to DVC (`rlhf stage`, or a run that failed): a run makes it again"
            )
        elif closed is not None and stopped:
            states[name] = f"not run: the {closed.name} gate is closed"
        else:
            states[name] = "not run yet"
        # DVC, which gives files it brings back times of its own, has not touched it.
        is_report = REPORT_PAGE in outputs and name not in recorded
        if is_report and (newer := newer_inputs(workspace, stages[name])):
            more = f" and {len(newer) - 1} more" if newer[1:] else ""
            stale_outputs[REPORT_PAGE] = f"{newer[-1]}{more} changed since"
    unknown = [name for name in names if name not in recorded and name != stopped]
    not_run = len(unknown) - len(made)
    stale_now = sum(name in recorded and name in stale and name != stopped for name in names)
    judged_here = closed is not None and not closed.changed_evidence(workspace)
    return StagesStatus(
        states,
        not_run,
        stale_now,
        made=len(made),
        closed=closed.name if closed is not None and judged_here else "",
        stale_outputs=stale_outputs,
    )


def newer_inputs(workspace: Path, stage: Mapping[str, Any]) -> list[str]:
    """Return the files that a stage reads and that are newer than the oldest that it wrote.

    The fingerprints of code, which every command may write, do not count.
    """
    made = [workspace / name for name in entry_names(stage.get("outs"))]
    times = [path.stat().st_mtime for path in made if path.is_file()]
    newer = []
    for name in entry_names(stage.get("deps")):
        path = workspace / name
        is_compared = path.is_file() and not name.startswith(".fingerprints/")
        if times and is_compared and path.stat().st_mtime > min(times):
            newer.append(name)
    return newer


def running_stages(workspace: Path, holder: LockHolder) -> StagesStatus:
    """Return the result, the progress or the wait of each stage of the run under way.

    DVC, which a stage keeps locked, is not asked.
    """
    since = datetime.fromisoformat(holder.since)
    state = read_run_state(workspace)
    if state is None or state.last_event < since or state.end is not None or not state.stages:
        message = "a command has just started, or does not report its stages; it keeps DVC from telling their state"
        return StagesStatus({}, note=message)
    now = datetime.now()
    elapsed = format_seconds((now - since).total_seconds())
    phase = f"; {state.phase}" if state.phase else ""
    head = f"{state.done}/{len(state.stages)} done after {elapsed}{phase}"
    states = {name: describe_stage(stage, now.timestamp()) for name, stage in state.stages.items()}
    return StagesStatus(states, note=head)


def stale_because(workspace: Path, gate: GateDecision, stages: StagesStatus) -> str:
    """Say why a gate has not judged what is there now; empty where it has."""
    if changed := gate.changed_evidence(workspace):
        return f"{', '.join(changed)} changed since"
    return stages.stale_outputs.get(f"gates/{gate.name}.json", "")


def gate_rows(gate: GateDecision, stale: str = "") -> list[Row]:
    """Describe a gate: passed, or a line for each condition that failed with what was found.

    Args:
        stale: Why it has not judged what is there now.
    """
    said = gate.verdict if gate.passed else f"{gate.verdict}: {gate.tally}"
    if stale:
        said += f", but of an earlier state: {stale}, so a run judges again"
    rows: list[Row] = [(gate.name, said)]
    return [*rows, *(("", condition) for condition in failed_conditions(gate))]


def partial_work(workspace: Path) -> list[str]:
    """Return the stages with saved partial state, from which an unchanged run resumes."""
    lines = []
    for folder in sorted((workspace / "work").glob("[!.]*/*")):
        checkpoints = sorted(path.name for path in folder.rglob("step-*") if path.is_dir())
        if checkpoints:
            stage = folder.parent.name
            lines.append(f"{stage}: {checkpoints[-1]} (work/{stage}/{folder.name})")
    return lines


OF_ANOTHER_POLICY = "of another policy than the one in models/"


def is_another_policy(workspace: Path, last: RunState | None) -> bool:
    """Whether models/ has a policy that the last run has not left there.

    Only ``rlhf run`` writes down what it does: ``dvc exp run`` and ``rlhf stage`` make others.
    """
    here = policy_here(workspace)
    return bool(here) and here != policy_of(last)


def policy_of(last: RunState | None) -> str:
    """By what the policy that a run has left is known; empty if it left none, or says nothing."""
    return last.verdict.policy if last is not None and last.verdict is not None else ""


def is_superseded(workspace: Path, last: RunState | None) -> bool:
    """Whether stages outside of a run have gone on from where the last run ended.

    They have made another policy, or opened the gate that stopped it.
    """
    if last is None:
        return False
    opened = last.final_state == GATE_FAILED and closed_gate(workspace) is None
    return opened or bool(policy_of(last) and is_another_policy(workspace, last))


def policy_maker(workspace: Path) -> str:
    """Say which command made the policy in models/, by the newest run in MLflow that did."""
    unknown = "unknown: MLflow has no run of it"
    if not has_record(workspace):
        return unknown
    client = connect(workspace)
    with registry_errors(client, "look up who made the policy"):
        own = training_run(client, workspace, POLICY_STAGE)
        if own is None:
            return unknown
        parent = client.get_run(own).data.tags.get(PARENT_TAG)
        if parent is None:
            return f"`rlhf stage {POLICY_STAGE}` (MLflow run {own})"
        return f"{_command_of(client.get_run(parent))} (MLflow run {parent})"


def _command_of(run: Run) -> str:
    """The command that opened the run of a pipeline, and what the run is called."""
    command = run.data.tags.get("mlflow.source.name", "rlhf run")
    return f"`{command}` {run.info.run_name}"


def _verdict_here(workspace: Path, stages: StagesStatus) -> str:
    state = stages.stages.get(EVALUATE_STAGE, "")
    if state.startswith("stale"):
        return "its evaluation is stale"
    return verdict_here(workspace) or "none: it is not evaluated"


def last_run_rows(workspace: Path, last: RunState, now: datetime) -> list[Row]:
    """Describe when the last run started, how it ended and how long it took, and its verdict."""
    age = format_age((now - last.last_event).total_seconds())
    seconds = last.seconds
    if seconds is None:
        seconds = (last.last_event - last.started).total_seconds()
    ending = ENDINGS.get(last.final_state, last.final_state.lower())
    ended = f"{ending} after {format_seconds(seconds)}, {age}; stages computed: {last.ran}"
    rows: list[Row] = [(None, f"{last.started:%Y-%m-%d %H:%M:%S}  {ended}")]
    if last.verdict is not None:
        told = verdict_rows(last.verdict, workspace)
        rows += [(label, text) for label, text in told if label not in NOT_OF_VERDICT]
    return rows


def recorded_run(
    workspace: Path, experiment: str, in_use: bool, last: RunState | None
) -> list[str]:
    """Describe the newest pipeline run in MLflow; of ``last``, which is described, its id only."""
    if not has_record(workspace):
        return []
    client = connect(workspace)
    mlflow_experiment = client.get_experiment_by_name(experiment)
    if mlflow_experiment is None:
        return []
    own = f"tags.`{PIPELINE_TAG}` = 'true' and tags.`{WORKSPACE_ID_TAG}` = '{known_workspace_id(workspace)}'"
    newest_first = ["attributes.start_time DESC"]
    runs = client.search_runs(
        [mlflow_experiment.experiment_id], own, max_results=1, order_by=newest_first
    )
    if not runs:
        return []
    info, command = runs[0].info, _command_of(runs[0])
    began = info.start_time / 1000
    if last is not None and abs(began - last.started.timestamp()) < SAME_RUN_SECONDS:
        return [f"MLflow run  {info.run_id}"]
    state = info.status.lower()
    tags = runs[0].data.tags
    # A DVC experiment may be at work in a folder of its own.
    goes_on = in_use or (EXPERIMENT_TAG in tags and not has_ended(tags.get(PROCESS_TAG, "")))
    if state == "running" and not goes_on:
        state = ENDINGS[""]
    duration = f" after {(info.end_time - info.start_time) / 1000:.0f} s" if info.end_time else ""
    started = datetime.fromtimestamp(began)
    return [f"{started:%Y-%m-%d %H:%M:%S}  {command} {state}{duration}  (MLflow run {info.run_id})"]

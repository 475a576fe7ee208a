"""The state of a run, by its events and the logs of its stages, and what is said of its parts."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.commands.text import (
    Row,
    format_metrics,
    format_rate,
    format_seconds,
    labelled_once,
    plain_number,
    print_rows,
)
from flows.pipeline.events import (
    COMPLETED,
    FAILED_STATES,
    EventLog,
    PhaseStarted,
    PipelineEvent,
    RunEnded,
    RunPlanned,
    RunTimed,
    StageEnded,
    StageRepeated,
    StageStarted,
    VerdictReached,
    events_file,
)
from flows.pipeline.verdict import RunVerdict, failure_reason, verdict_facts
from flows.stage import RESUMED, LoggedProgress, StageOutcome, progress_lines
from flows.supervision.processes import LogReader
from flows.workspace import PRIVATE, display_path
from rlhf_core.errors import EXIT_INTERRUPTED, RlhfError
from rlhf_core.evaluation.verdict import Standing, judge_results
from rlhf_core.gates import GateDecision
from rlhf_core.storage.files import read_json

TAIL_BYTES = 4096
SHORTEST_LEFT = 0.5  # seconds; less would be shown as none while the stage still works


class StageProgress:
    """Follows the progress lines that a stage appends to its log.

    The rate is that of the last minutes, between the first and the last of the lines that one loop
    has printed last. So steps which a resumed stage made in an earlier process do not count.
    """

    def __init__(self, log: Path, start: int | None = None) -> None:
        self.reader = LogReader(log, start)
        self.first: LoggedProgress | None = None
        self.latest: LoggedProgress | None = None
        self.latest_at = 0.0
        self.resumed = ""  # such as "resumed at 300/550", where an earlier process has begun

    def refresh(self) -> None:
        """Read what the log says now."""
        text = self.reader.text(TAIL_BYTES)
        self.resumed = next(reversed(RESUMED.findall(text)), self.resumed)
        lines = progress_lines(text)
        if not lines or lines[-1] == self.latest:
            return
        self.latest, self.latest_at = lines[-1], self.reader.log.stat().st_mtime
        self.first = self.latest
        for line in reversed(lines):
            later = self.first
            # Of one loop of one process: a retry or the next loop starts anew.
            is_same = (line.description, line.total) == (later.description, later.total)
            is_earlier = line.done <= later.done and (line.seconds or 0.0) <= (later.seconds or 0.0)
            if not (is_same and is_earlier):
                break
            self.first = line

    @property
    def rate(self) -> float | None:
        """Steps per second, None before two lines: an earlier process may have made the first."""
        first, latest = self.first, self.latest
        if latest is None or first is None or latest.seconds is None or first.seconds is None:
            return None
        steps, seconds = latest.done - first.done, latest.seconds - first.seconds
        return steps / seconds if steps > 0 and seconds > 0 else None

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return how long the last step is away from ``now``, None if unknown or over.

        Args:
            now: Seconds since the epoch; None for this moment.
        """
        rate = self.rate
        if self.latest is None or rate is None:
            return None
        now = time.time() if now is None else now
        since = max(0.0, now - self.latest_at)
        left = (self.latest.total - self.latest.done) / rate - since
        return left if left >= SHORTEST_LEFT else None

    def describe(self, now: float | None = None) -> list[str]:
        """Return count, time left, rate, where it resumed, and metrics, as far as they are known."""
        latest, left, rate = self.latest, self.seconds_left(now), self.rate
        if latest is None:
            return []
        parts = [f"{latest.done}/{latest.total}"]
        if latest.done >= latest.total:
            parts.append("finishing")
        elif left:
            parts.append(f"{format_seconds(left)} left")
        if rate:
            parts.append(format_rate(rate))
        if self.resumed:
            parts.append(self.resumed)
        return parts + format_metrics(latest.metrics)


Describe = Callable[[Mapping[str, Any]], str]


def describe_result(workspace: Path, stage: str) -> str:
    """Describe what ``stage`` has produced; empty if it or its metrics are not known."""
    if stage not in RESULTS:
        return ""
    file, describe = RESULTS[stage]
    try:
        return describe(read_json(workspace / file))
    except (RlhfError, LookupError, TypeError, ValueError, AttributeError):
        return ""  # a pipeline of one's own may have a stage of this name with other metrics


def _gate(gate: Mapping[str, Any]) -> str:
    decision = GateDecision.of("", gate)
    count = len(decision.conditions)
    return f"{decision.verdict}: {count - len(decision.failed)}/{count}"


def _selected(ppo: Mapping[str, Any]) -> str:
    if ppo.get("method") == "dpo":
        return f"DPO, held-out loss {ppo['validation_loss']:.3f}, accuracy {ppo['validation_accuracy']:.2f}"
    if ppo.get("method") == "rejection_sampling":
        return f"reward {ppo['reward_sampled']:z.2f} of all replies, {ppo['reward_kept']:z.2f} of those trained on"
    if "selected" not in ppo:
        last = ppo["last"]
        return f"iteration {ppo['iterations']}, the last; KL {last['kl']:z.2f}, reward {last['reward_mean']:z.2f}"
    selected = ppo["selected"]
    win_rate = selected["referee"]["win_rate"]
    figures = f"win rate {win_rate:.2f}, KL {selected['kl']:z.2f} on its prompts"
    return f"iteration {selected['iteration']} selected by the referee: {figures}"


def _too_long(training: Mapping[str, Any]) -> str:
    dropped = int(training.get("dropped_over_long", 0))
    return f", {dropped} rows too long" if dropped else ""


def _accuracy(reward: Mapping[str, Any]) -> str:
    """The accuracy on test pairs and on the balanced ones, each with its number of pairs."""
    split, name = "", "validation"
    if "test_accuracy" in reward:
        split, name = "test_", "test"
    text = f"{name} accuracy {reward[f'{split}accuracy']:.3f}"
    if f"{split}pairs" in reward:
        text += f" of {int(reward[f'{split}pairs'])} pairs"
    balanced = reward.get(f"{split}accuracy_length_balanced")
    if balanced is not None:
        pairs = int(reward[f"{split}length_balanced_pairs"])
        text += f", length-balanced {balanced:.3f} of {pairs}"
    return f"{text}{_too_long(reward)}"


def _perplexity(sft: Mapping[str, Any]) -> str:
    if sft.get("reason"):
        return str(sft["reason"])
    return f"perplexity {plain_number(sft['perplexity'])}{_too_long(sft)}"


def _explained_variance(critic: Mapping[str, Any]) -> str:
    if critic.get("reason"):
        return str(critic["reason"])
    return f"explained variance {critic['explained_variance']:z.2f}"


def _win_rates(evaluation: Mapping[str, Any]) -> str:
    judges = judge_results(evaluation["comparison"])
    return "win rate by " + ", ".join(f"{of.judge} {of.win_rate:.2f}" for of in judges)


# Where each stage leaves its result, and how that is described.
RESULTS: dict[str, tuple[str, Describe]] = {
    "validate": ("gates/data.json", _gate),
    "sft": ("metrics/sft.json", _perplexity),
    "gate-sft": ("gates/sft.json", _gate),
    "reward": ("metrics/reward.json", _accuracy),
    "referee": ("metrics/referee.json", _accuracy),
    "judge": ("metrics/judge.json", _accuracy),
    "gate-reward": ("gates/reward.json", _gate),
    "critic": ("metrics/critic.json", _explained_variance),
    "ppo": ("metrics/ppo.json", _selected),
    "evaluate": ("metrics/evaluation.json", _win_rates),
    "gate-policy": ("gates/policy.json", _gate),
}


@dataclass
class StageState:
    """One stage of a run: it waits, runs with ``progress``, or has ended with an ``outcome``.

    ``note`` says where or why it waits, ``result`` what it has produced or why it failed.
    """

    name: str
    progress: StageProgress | None = None
    started: float = 0.0
    outcome: StageOutcome | None = None
    note: str = ""
    result: str = ""


class RunState:
    """The stages of a run, the phase that it is in, and its end.

    Attributes:
        verdict: None as long as the run has not reached one.
        end: None while it runs, or if its process was gone before it could report an end.
        seconds: How long the command took that started it; None where none did, or it was killed.
        started: When the first event was written, and ``last_event`` the last, if they were read.
        own_pools: The work pools whose worker is this command's own. Which they are is not in the
            events.
    """

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.phase = ""
        self.phase_progress: StageProgress | None = None
        self.stages: dict[str, StageState] = {}
        self.verdict: RunVerdict | None = None
        self.end: RunEnded | None = None
        self.seconds: float | None = None
        self.started = self.last_event = datetime.now()
        self.own_pools: Collection[str] = ()

    def apply(self, event: PipelineEvent) -> None:
        """Update the state with the next event."""
        match event:
            case RunPlanned(stages):
                self.stages = {name: StageState(name) for name in stages}
                self.enter_phase("")
            case StageStarted(name, pool, started, log_start):
                progress = StageProgress(self._log(name), log_start)
                here = ", on this machine" if pool in self.own_pools else ""
                note = f"job of the work pool {pool}{here}" if pool else ""
                self.stages[name] = StageState(name, progress, started, note=note)
            case StageEnded(outcome):
                self._end_stage(outcome)
            case StageRepeated(name, message, log_start):
                stage = self._stage(name)
                stage.note, stage.progress = message, StageProgress(self._log(name), log_start)
            case PhaseStarted(phase, log):
                self.enter_phase(phase)
                self.phase_progress = StageProgress(self._log(log), 0) if log else None
            case VerdictReached(verdict):
                self.verdict = verdict
            case RunEnded():
                self.end = event
                self.enter_phase("")
            case RunTimed(seconds):
                self.seconds = seconds
            case _:
                pass

    def enter_phase(self, phase: str) -> None:
        """Set what the run is doing between its stages; empty if nothing."""
        self.phase, self.phase_progress = phase, None

    def refresh(self) -> None:
        """Read the logs of the running stages."""
        for stage in self.running:
            assert stage.progress is not None
            stage.progress.refresh()
        if self.phase_progress is not None:
            self.phase_progress.refresh()

    @property
    def running(self) -> list[StageState]:
        """The stages that have started and not ended."""
        started = [stage for stage in self.stages.values() if stage.progress is not None]
        return [stage for stage in started if stage.outcome is None]

    @property
    def ran(self) -> int:
        """How many stages were computed."""
        return sum(outcome.action == "ran" for outcome in self.outcomes)

    @property
    def done(self) -> int:
        """How many stages are up to date."""
        return sum(outcome.ok for outcome in self.outcomes)

    @property
    def outcomes(self) -> list[StageOutcome]:
        """How the stages ended that have ended."""
        return [stage.outcome for stage in self.stages.values() if stage.outcome is not None]

    @property
    def final_state(self) -> str:
        """The name of the state that the run ended in; empty if it reported none."""
        return self.end.state if self.end is not None else ""

    def _end_stage(self, outcome: StageOutcome) -> None:
        stage = self._stage(outcome.stage)
        stage.outcome = outcome
        if outcome.ok:
            resumed = ""
            if stage.progress is not None:
                stage.progress.refresh()
                resumed = stage.progress.resumed
            stage.result = _joined(resumed, describe_result(self.workspace, outcome.stage))
        elif outcome.action == "failed":
            stage.result = failure_reason(self.workspace, outcome)

    def _stage(self, name: str) -> StageState:
        return self.stages.setdefault(name, StageState(name))

    def _log(self, name: str) -> Path:
        return self.workspace / PRIVATE / "logs" / f"{name}.log"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def read_run_state(workspace: Path) -> RunState | None:
    """Return the state of the last run, or of the one under way; None if its events say nothing.

    Nothing is changed: this is for a process that looks on.
    """
    log, state = EventLog(events_file(workspace)), RunState(workspace)
    try:
        events = log.read_new()
    except (LookupError, TypeError, ValueError):  # another version wrote them
        return None
    if not events:
        return None
    for event in events:
        state.apply(event)
    state.refresh()
    state.started = datetime.fromtimestamp(log.first)
    state.last_event = datetime.fromtimestamp(log.last)
    return state


UNCOMPUTED = {"cached": "up to date", "skipped": "not started"}


def describe_stage(stage: StageState, now: float) -> str:
    """Describe a stage in a line: ``running 12/90, 1:02 left``, ``ran in 0:51, perplexity 1.52``."""
    if stage.outcome is not None:
        outcome = stage.outcome
        if outcome.action in UNCOMPUTED:
            return _joined(UNCOMPUTED[outcome.action], stage.result)
        verb = "ran in" if outcome.action == "ran" else f"{outcome.action} after"
        return _joined(f"{verb} {format_seconds(outcome.ended - outcome.started)}", stage.result)
    if stage.progress is None:
        return stage.note or "waiting"
    if stage.progress.latest is None:
        return _joined(f"running for {format_seconds(now - stage.started)}", stage.note)
    return f"running {_joined(*stage.progress.describe(now))}"


STYLES = {Standing.BETTER: "bold green", Standing.WORSE: "bold red"}
# The exit status of ``rlhf run`` by the final state of the flow; 1 for any other.
EXIT_CODES = {
    COMPLETED: 0,
    "Cancelled": EXIT_INTERRUPTED,
    **{name: code for code, name in FAILED_STATES.items()},
}


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Return for how long at least one stage worked: the length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(state: RunState, total: float) -> list[str]:
    """Return the lines to print at the end of a run that lasted ``total`` seconds."""
    outcomes = state.outcomes
    actions = [outcome.action for outcome in outcomes]
    shown = [action for action in ("ran", "cached", "failed", "stopped") if action in actions]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in shown)
    worked = [outcome for outcome in outcomes if outcome.work_seconds > 0]
    busy = busy_seconds([(of.ended - of.work_seconds, of.ended) for of in worked])
    times = f"{total:.1f} s in all; for {busy:.1f} s of them some stage was at work"
    return [
        f"stages: {counts or 'none'}; {times}",
        f"logs:   {state.workspace / '.rlhf' / 'logs'}",
    ]


def verdict_rows(verdict: RunVerdict, workspace: Path, told: str = "") -> list[Row]:
    """Return the facts of a verdict, then its report and the command to type next."""
    rows = labelled_once(verdict_facts(verdict, told))
    if verdict.report:
        rows.append(("report", display_path(workspace / verdict.report)))
    release = verdict.release
    return [*rows, ("next", next_line(workspace, release.next_command, release.next_hint))]


def next_line(workspace: Path, command: str, hint: str) -> str:
    """Return the command to type next and what it is for; commands in ``hint`` are completed."""
    hint = re.sub("`(rlhf [^`]+)`", lambda found: f"`{command_for(workspace, found[1])}`", hint)
    return f"{command_for(workspace, command)}   ({hint})"


def command_for(workspace: Path, command: str) -> str:
    """Return ``command`` as typed in the current folder: elsewhere it needs ``--workspace``."""
    here = Path.cwd().resolve()
    if workspace.resolve() in (here, *here.parents):
        return command
    return f"{command} --workspace {shlex.quote(display_path(workspace))}"


def print_verdict(verdict: RunVerdict, workspace: Path, told: str = "") -> None:
    """Print the verdict, on a terminal coloured and apart from what stands above it."""
    if sys.stdout.isatty():
        print()
    styles = {"verdict": STYLES.get(verdict.standing, "bold"), "next": "bold cyan"}
    print_rows(verdict_rows(verdict, workspace, told), styles)

"""The summary at the end of a run: stages and their times, logs, and the verdict with the next command."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.commands.run_state import RunState
from flows.pipeline.events import COMPLETED, FAILED_STATES
from flows.pipeline.verdict import RunVerdict
from flows.workspace import display_path
from rlhf_core.errors import EXIT_INTERRUPTED
from rlhf_core.evaluation.verdict import Standing

STYLES = {Standing.BETTER: "bold green", Standing.WORSE: "bold red"}
# The exit status of ``rlhf run`` by the final state of the flow; 1 for any other.
EXIT_CODES = {COMPLETED: 0, "Cancelled": EXIT_INTERRUPTED, **{name: code for code, name in FAILED_STATES.items()}}


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of ``(start, end)`` spans: the time in which at least one stage worked."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(state: RunState, total: float) -> list[str]:
    """Return the lines to print at the end of a run that lasted ``total`` seconds."""
    outcomes = state.outcomes
    actions = [outcome.action for outcome in outcomes]
    counts = [f"{actions.count(a)} {a}" for a in ("ran", "cached", "failed", "stopped") if a in actions]
    busy = busy_seconds([(o.ended - o.work_seconds, o.ended) for o in outcomes if o.work_seconds > 0])
    times = f"{total:.1f} s in all, of which {busy:.1f} s in stages"
    return [f"stages: {', '.join(counts) or 'none'}; {times}", f"logs:   {state.workspace / '.rlhf' / 'logs'}"]


def verdict_rows(verdict: RunVerdict, workspace: Path) -> list[tuple[str, str]]:
    """Return the verdict as pairs of label and text; the last one is the command to type next."""
    rows = [("verdict", verdict.headline)]
    rows += [
        (
            "" if number else "judges",
            f"{judge.judge}: win rate {judge.win_rate:.1%}, 95 % interval {judge.low95:.1%} to {judge.high95:.1%}, "
            f"{judge.prompts} prompts about {judge.clusters} questions"
            + (f"; {judge.lc_win_rate:.1%} at equal length" if judge.lc_win_rate is not None else ""),
        )
        for number, judge in enumerate(verdict.judges)
    ]
    rows += [("", meaning) for meaning in verdict.meanings]
    if verdict.kl is not None:
        kl = verdict.kl
        rows.append(("KL", f"{kl.mean:.2f} nats per reply from SFT, 95 % interval {kl.low95:.2f} to {kl.high95:.2f}"))
    rows += [("" if number else "alarms", alarm) for number, alarm in enumerate(verdict.alarms)]
    # What has stopped the run is told once, however often it is the reason.
    _, _, failure = verdict.headline.partition("no verdict: ")
    outcomes = {"registered": verdict.registered, "promotion": verdict.promotion}
    rows += [(label, text.replace(failure, "see above") if failure else text) for label, text in outcomes.items()]
    if verdict.note:
        rows.append(("note", verdict.note))
    if verdict.report:
        rows.append(("report", display_path(workspace / verdict.report)))
    return [*rows, ("next", next_line(workspace, verdict.next_command, verdict.next_hint))]


def next_line(workspace: Path, command: str, hint: str) -> str:
    """Return the command to type next and what it is for; commands within ``hint`` are completed, too."""
    hint = re.sub("`(rlhf [^`]+)`", lambda found: f"`{command_for(workspace, found[1])}`", hint)
    return f"{command_for(workspace, command)}   ({hint})"


def command_for(workspace: Path, command: str) -> str:
    """Return ``command`` as it is to be typed in the current folder: with ``--workspace`` if that is elsewhere."""
    here = Path.cwd().resolve()
    if workspace.resolve() in (here, *here.parents):
        return command
    return f"{command} --workspace {shlex.quote(display_path(workspace))}"


def print_verdict(verdict: RunVerdict, workspace: Path) -> None:
    """Print the verdict: aligned and coloured on a terminal, a line per row elsewhere."""
    rows = verdict_rows(verdict, workspace)
    if not sys.stdout.isatty():
        for label, text in rows:
            print(f"{label:<10}  {text}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for label, text in rows:
        style = {"verdict": STYLES.get(verdict.standing, "bold"), "next": "bold cyan"}.get(label, "")
        table.add_row(Text(label, style="dim"), Text(text, style=style, overflow="fold"))
    Console(highlight=False).print("", table)

"""How commands write errors, gates, durations, rates and metrics, and the end of a log."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from flows.workspace import PRIVATE
from rlhf_core.data.text import for_terminal
from rlhf_core.errors import DataError, GateFailed, RlhfError
from rlhf_core.evaluation.remedies import remedy_for
from rlhf_core.gates import REPORT_MODE, GateDecision
from rlhf_core.redaction import redacted
from rlhf_core.runtime import progress
from rlhf_core.storage.files import read_json

PROGRAM = "rlhf"
INDENT = "  "
ALIGNED = re.compile(r" *\S+( \S+)*? {2,}(?=\S)")  # a label and the gap after it


def without_secrets(value: Any) -> Any:
    """Return ``value`` as JSON knows it, without secrets; times and paths become texts."""
    return json.loads(redacted(json.dumps(value, ensure_ascii=False, default=str)))


def error_console(stream: TextIO) -> Console:
    """Return a console for ``stream``: as wide as a terminal; without control codes elsewhere or
    with ``NO_COLOR``.
    """
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def print_error(message: str, stream: TextIO) -> None:
    """Print ``rlhf: MESSAGE`` with its line breaks, other control characters escaped; a terminal
    wraps at words.
    """
    console = error_console(stream)
    text = Text.assemble((f"{PROGRAM}:", "bold red"), " ", for_terminal(redacted(message.strip())))
    console.print(text, soft_wrap=not console.is_terminal)


def print_gate_failure(error: GateFailed, stream: TextIO) -> None:
    """Print which conditions of a gate failed as a table, or the message where the evidence cannot
    be read.
    """
    gate = None
    if error.evidence is not None:
        with suppress(DataError):
            gate = GateDecision.of(error.evidence.stem, read_json(error.evidence))
    if gate is None:
        print_error(str(error), stream)
        return
    print_error(gate_verdict(gate), stream)
    console = error_console(stream)
    console.print(gate_table(gate))
    console.print(f"evidence: {error.evidence}", soft_wrap=not console.is_terminal)


def print_failed_gates(workspace: Path, stream: TextIO, *, remedies: bool = True) -> None:
    """Print the table of every gate of ``workspace`` whose conditions do not hold; ``remedies`` as
    for a table.
    """
    console = error_console(stream)
    for path in sorted((workspace / "gates").glob("*.json")):
        with suppress(DataError):  # `rlhf status` names a file that cannot be read
            gate = GateDecision.of(path.stem, read_json(path))
            if gate.failed:
                console.print(f"gate {gate.name}", style="bold")
                console.print(gate_table(gate, remedies=remedies))


def gate_verdict(gate: GateDecision) -> str:
    """Say in one line whether a gate passed."""
    count = len(gate.conditions)
    if gate.passed:
        return f"the {gate.name} gate passed: {count} of {count} conditions hold"
    counted = (
        f"{len(gate.failed)} of {count} conditions do not hold" if count else "it has no conditions"
    )
    mode = ", but the mode is report: the pipeline went on" if gate.mode == REPORT_MODE else ""
    return f"the {gate.name} gate failed: {counted}{mode}"


def gate_table(gate: GateDecision, *, every_reason: bool = False, remedies: bool = True) -> Group:
    """Return a gate's conditions as a table, failures first; below it why each that failed is
    asked, and what to do.

    Args:
        every_reason: Give the reasons of the bounds that hold, too.
        remedies: Say what to do about each that failed.
    """
    conditions = gate.failures_first
    rows = ((row.passed, row.metric, row.measured, row.required) for row in conditions)
    table = marked_table(["metric", Column("value", justify="right"), "bound"], rows)
    below = []
    for row in conditions:
        if row.why and (every_reason or not row.passed):
            below.append(Text.assemble((row.metric, "bold"), f": {row.why}"))
        if remedies and not row.passed:
            below.append(Text.assemble(("to do", "bold"), f": {remedy_for(gate.name, row.metric)}"))
    return Group(table, *(Padding(line, (0, 0, 0, 2)) for line in below))


def marked_table(
    columns: Sequence[str | Column], rows: Iterable[tuple[bool, str, str, str]]
) -> Padding:
    """Return a table of what was required, each row marked by its first entry: whether it holds."""
    folded = [
        column if isinstance(column, Column) else Column(column, overflow="fold")
        for column in columns
    ]
    table = Table("", *folded, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for holds, *cells in rows:
        table.add_row(
            Text("ok", style="green") if holds else Text("FAIL", style="bold red"), *cells
        )
    return Padding(table, (0, 0, 0, 2))


def fitted(text: str) -> str:
    """Return ``text`` with every line wrapped to the terminal, unchanged if stdout is not one."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(fit_line(line, width) for line in text.splitlines())


def fit_line(line: str, width: int | None) -> str:
    """Wrap a line to ``width``, its continuation lines under the text after its label; words are
    never cut.
    """
    if width is None or len(line) <= width:
        return line
    text = line.lstrip()
    margin = line[: len(line) - len(text)]
    label = ALIGNED.match(line)
    indent = len(label[0]) if label and len(label[0]) <= width // 2 else len(margin) + len(INDENT)
    return textwrap.fill(
        text,
        width,
        initial_indent=margin,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def format_seconds(seconds: float) -> str:
    """Format a duration in at most six characters for a hundred days: ``0:07``, ``12:30``,
    ``3h05m``, ``2d04h``.
    """
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def format_age(seconds: float) -> str:
    """Format how long ago something was in whole units: ``just now``, ``20 minutes ago``,
    ``3 days ago``.
    """
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def format_rate(per_second: float) -> str:
    """Format a rate as ``14/s``, or below one per second as ``3.2 s each``."""
    return (
        f"{plain_number(per_second)}/s"
        if per_second >= 1
        else f"{plain_number(1 / per_second)} s each"
    )


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Format the metrics of a progress line: ``loss 0.41``, ``17.8k tokens/s`` for one that is
    called ``tokens_s``.
    """
    return [
        f"{_thousands(value)} {name.removesuffix('_s')}/s"
        if name.endswith("_s")
        else f"{name} {plain_number(value)}"
        for name, value in metrics.items()
    ]


def plain_number(value: float) -> str:
    """Format a number with three digits, or all digits before the point if it is large: ``0.342``,
    ``14,916``.
    """
    return progress.plain_number(value, 3, ",")


def _thousands(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:
            return f"{plain_number(value / limit)}{unit}"
    return plain_number(value)


# What DVC advises after each stage: the pipeline keeps dvc.lock by itself.
DVC_ADVICE = (
    "Updating lock file 'dvc.lock'",
    "To track the changes with git, run:",
    "git add ",
    "To enable auto staging, run:",
    "dvc config core.autostage true",
    "Use `dvc push` to send your updates",
)


def last_lines(workspace: Path, name: str, lines: int) -> str:
    """Return the last lines of ``.rlhf/logs/NAME.log``, without empty ones and DVC's advice.

    Raises:
        RlhfError: there is no such log; the message names those that exist.
    """
    folder = workspace / PRIVATE / "logs"
    known = sorted(path.stem for path in folder.glob("*.log"))
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "nothing has run yet"
        raise RlhfError(f"{workspace} has no log of {name}; {there}")
    with (folder / f"{name}.log").open(encoding="utf-8", errors="replace") as stream:
        shown = (
            line for line in stream if line.strip() and not line.strip().startswith(DVC_ADVICE)
        )
        return "".join(deque(shown, lines)).rstrip("\n")

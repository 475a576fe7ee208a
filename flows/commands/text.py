"""How commands write rows of text, errors, gates, numbers, and the end of a log."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from flows.workspace import PRIVATE
from rlhf_core.data.text import for_terminal
from rlhf_core.errors import DataError, GateFailed, RlhfError
from rlhf_core.evaluation.remedies import remedies
from rlhf_core.gates import GateDecision
from rlhf_core.redaction import redacted
from rlhf_core.runtime import progress

PROGRAM = "rlhf"
INDENT = "  "
# A label and the text beside it. A line without a label (None) begins at the margin.
Row = tuple[str | None, str]


def without_secrets(value: Any) -> Any:
    """Return ``value`` as JSON knows it, without secrets; times and paths become texts."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return json.loads(redacted(text))


class PlainConsole(Console):
    """A console for texts of others: no markup, and their control characters as escapes.

    Names, reasons, settings and errors come from files and servers that others write to.
    """

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        super().__init__(file=stream, width=width, highlight=False, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the parts of what is printed; only rich's own parts may move the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=for_terminal(segment.text))


def print_line(text: str, stream: IO[str]) -> None:
    """Print a line as soon as it is known, with control characters as escapes."""
    print(for_terminal(text), file=stream, flush=True)


def print_error(message: str, stream: TextIO) -> None:
    """Print ``rlhf: MESSAGE``; of its control characters only line breaks stay."""
    console = PlainConsole(stream)
    shown = redacted(message.strip())
    text = Text.assemble((f"{PROGRAM}:", "bold red"), " ", shown)
    console.print(text, soft_wrap=not console.is_terminal)


def print_gate_failure(error: GateFailed, stream: TextIO) -> None:
    """Print a table of the conditions that failed, or the message if there is no evidence."""
    gate = None
    if error.evidence is not None:
        with suppress(DataError):
            gate = GateDecision.load(error.evidence)
    if gate is None:
        print_error(str(error), stream)
        return
    print_error(gate.describe(), stream)
    console = PlainConsole(stream)
    console.print(gate_table(gate))
    console.print(f"evidence: {error.evidence}", soft_wrap=not console.is_terminal)


def print_failed_gates(workspace: Path, stream: TextIO, *, advice: bool = True) -> None:
    """Print a table of every gate of ``workspace`` that failed; ``advice`` as for one table."""
    console = PlainConsole(stream)
    for path in sorted((workspace / "gates").glob("*.json")):
        with suppress(DataError):  # `rlhf status` names a file that cannot be read
            gate = GateDecision.load(path)
            if gate.failed:
                console.print(f"gate {gate.name}", style="bold")
                console.print(gate_table(gate, advice=advice))


def gate_table(gate: GateDecision, *, every_reason: bool = False, advice: bool = True) -> Group:
    """Return a gate's conditions as a table, failures first, and below it what to do about them.

    Args:
        every_reason: Give the reasons of the bounds that hold, too.
        advice: Say what to do about those that failed.
    """
    conditions = gate.failures_first
    rows = ((row.passed, row.metric, row.measured, row.required) for row in conditions)
    table = marked_table(["metric", Column("value", justify="right"), "bound"], rows)
    below = []
    for row in conditions:
        if row.why and (every_reason or not row.passed):
            below.append(Text.assemble((row.metric, "bold"), f": {row.why}"))
    if advice:
        below += [Text.assemble(("to do", "bold"), f" {remedy}") for remedy in remedies(gate)]
    return Group(table, *(Padding(line, (0, 0, 0, 2)) for line in below))


def marked_table(
    columns: Sequence[str | Column], rows: Iterable[tuple[bool, str, str, str]]
) -> Padding:
    """Return a table of what was required; the first entry of a row says whether it holds."""
    table = plain_table(["", *columns])
    for holds, *cells in rows:
        mark = Text("ok", style="green") if holds else Text("FAIL", style="bold red")
        table.add_row(mark, *cells)
    return Padding(table, (0, 0, 0, 2))


def plain_table(columns: Sequence[str | Column]) -> Table:
    """Return a table without lines, two columns apart; its longer texts are folded."""
    shown = []
    for column in columns:
        shown.append(Column(column, overflow="fold") if isinstance(column, str) else column)
    return Table(*shown, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def aligned(
    rows: Iterable[Row],
    width: int | None = None,
    *,
    indent: str = "",
    styles: Mapping[str, str] | None = None,
) -> Text:
    """Return rows as lines whose texts stand beneath each other, without secrets or control codes.

    Words are never cut.

    Args:
        width: The columns of a terminal: a longer text goes on beneath its beginning. None leaves
            each text on one line.
        styles: How rich shows the text of a label.
    """
    rows = list(rows)
    room = max((len(label) for label, _ in rows if label is not None), default=0)
    lines = []
    for label, text in rows:
        head = indent
        if label is not None:
            head += f"{label:<{room}}{INDENT}"
        margin = len(head)
        if label is None or (width is not None and margin > width // 2):
            margin = len(indent) + len(INDENT)
        style = (styles or {}).get(label or "", "")
        for paragraph in for_terminal(redacted(text)).splitlines() or [""]:
            for line in _wrapped(paragraph, width, head, " " * margin):
                start = line[: len(head)]
                lines.append(Text.assemble((start, "dim"), (line[len(head) :].rstrip(), style)))
                head = " " * margin
    return Text("\n").join(lines)


def labelled_once(rows: Iterable[Row]) -> list[Row]:
    """Return rows in which only the first of those with the same label has it."""
    shown: list[Row] = []
    before: str | None = None
    for label, text in rows:
        repeats = label is not None and label == before
        shown.append(("" if repeats else label, text))
        before = label
    return shown


def unlabelled(lines: Iterable[str]) -> list[Row]:
    """Return lines as rows that begin at the margin."""
    return [(None, line) for line in lines]


def _wrapped(text: str, width: int | None, head: str, margin: str) -> list[str]:
    if width is None or len(head) + len(text) <= width:
        return [head + text]
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def terminal_columns() -> int | None:
    """Return the width of the terminal that standard output is; None if it is something else."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_rows(rows: Iterable[Row], styles: Mapping[str, str] | None = None) -> None:
    """Print rows on standard output, wrapped and coloured on a terminal."""
    print_screen(aligned(rows, terminal_columns(), styles=styles))


def print_screen(text: Text) -> None:
    """Print lines that :func:`aligned` has fitted."""
    PlainConsole(sys.stdout).print(text, soft_wrap=True)


def format_seconds(seconds: float) -> str:
    """Format a duration in at most six characters: ``0:07``, ``12:30``, ``3h05m``, ``2d04h``."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def format_age(seconds: float) -> str:
    """Format how long ago something was: ``just now``, ``20 minutes ago``, ``3 days ago``."""
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def format_rate(per_second: float) -> str:
    """Format a rate as ``14/s``, or below one per second as ``3.2 s each``."""
    if per_second >= 1:
        return f"{plain_number(per_second)}/s"
    return f"{plain_number(1 / per_second)} s each"


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Format metrics of a progress line: ``loss 0.41``; ``tokens_s`` as ``17.8k tokens/s``."""
    shown = []
    for name, value in metrics.items():
        if name.endswith("_s"):
            shown.append(f"{_thousands(value)} {name.removesuffix('_s')}/s")
        else:
            shown.append(f"{name} {plain_number(value)}")
    return shown


def plain_number(value: float) -> str:
    """Format a number with three digits, and all before the point: ``0.342``, ``14,916``."""
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
    shown: deque[str] = deque(maxlen=lines)
    with (folder / f"{name}.log").open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if line.strip() and not line.strip().startswith(DVC_ADVICE):
                shown.append(line)
    return "".join(shown).rstrip("\n")

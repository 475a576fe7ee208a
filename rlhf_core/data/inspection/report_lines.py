"""Lines of reports on data for a terminal: wrapped texts, rows, and tables of lengths."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_core.data.readers.detection import unused_lines, warnings_of
from rlhf_core.data.row_counts import RowCounts
from rlhf_core.data.schema import REPLIES
from rlhf_core.data.statistics import PERCENTILES

INDENT, LABEL_WIDTH = "  ", 9


def wrapped(label: str, text: str, width: int) -> list[str]:
    """Return ``label`` and ``text`` in lines of at most ``width`` columns, behind the label."""
    indent = " " * len(label)
    lines = textwrap.wrap(
        text, max(width, 40), initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
    )
    return lines or [label.rstrip()]


def outcome_lines(counts: RowCounts, width: int) -> list[str]:
    """Return what became of the records that give no row, and the lines of :func:`column_lines`."""
    lines = []
    for reason, rows in counts.dropped.most_common():
        lines += wrapped(f"  dropped  {rows}: ", reason, width)
    for refused in counts.reasons.commonest():
        reason = f"{refused.reason} (first at row {refused.first.position})"
        lines += wrapped(f"  refused  {refused.rows}: ", reason, width)
    return lines + column_lines(counts, width)


def column_lines(counts: RowCounts, width: int) -> list[str]:
    """Return what to look at before training on a source, and which columns are not read."""
    lines = []
    for warning in warnings_of(counts):
        lines += wrapped("  WARNING  ", warning, width)
    for unused in unused_lines(counts):
        lines += wrapped("  unused   ", unused, width)
    return lines


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural ends with an s: "1 pair", "2 pairs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def example_lines(kind: str, row: Mapping[str, Any], width: int) -> list[str]:
    """Return a row as a line per turn and reply, each cut to ``width``."""
    if kind == "pretrain":
        texts = [("text", row["text"])]
    else:
        texts = [(turn["role"], turn["content"]) for turn in row["prompt"]]
        texts += [(name, row[name]) for name in REPLIES[kind]]
    lines = []
    for label, text in texts:
        line = Text(f"{INDENT * 2}{label:<{LABEL_WIDTH}}  {' '.join(text.split())}")
        line.truncate(width, overflow="ellipsis")  # in columns: a Chinese character takes two
        lines.append(line.plain)
    return lines


def percentile_table(unit: str, rows: Mapping[str, Sequence[int]], width: int) -> list[str]:
    """Return percentiles by name as the indented lines of a table of lengths in ``unit``."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=len("prompt + reply"))
    for _ in PERCENTILES:
        table.add_column(justify="right", min_width=6)
    table.add_row(unit, *(f"{percentile} %" for percentile in PERCENTILES[:-1]), "longest")
    for name, values in rows.items():
        table.add_row(name, *map(str, values))
    output = io.StringIO()
    Console(file=output, width=max(width - 2 * len(INDENT), 40), color_system=None).print(table)
    return [f"{INDENT * 2}{line.rstrip()}" for line in output.getvalue().splitlines()]

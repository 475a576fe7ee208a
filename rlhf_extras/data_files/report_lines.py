"""Lines of reports on data for a terminal: wrapped texts, warnings, and tables of lengths."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from rlhf_core.data.readers.detection import unused_lines, warnings_of
from rlhf_core.data.row_counts import RowCounts
from rlhf_core.data.statistics import PERCENTILES

INDENT = "  "


def wrapped(label: str, text: str, width: int) -> list[str]:
    """Return ``label`` and ``text`` in lines of at most ``width`` columns, behind the label."""
    indent = " " * len(label)
    lines = textwrap.wrap(
        text, max(width, 40), initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
    )
    return lines or [label.rstrip()]


def column_lines(counts: RowCounts, width: int) -> list[str]:
    """Return what to look at before training on a source, and which columns are not read."""
    lines = []
    for warning in warnings_of(counts):
        lines += wrapped("  WARNING  ", warning, width)
    for unused in unused_lines(counts):
        lines += wrapped("  unused   ", unused, width)
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

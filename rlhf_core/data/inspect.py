"""Describe how readers understand a file: format, rows, refused rows and reasons (the command ``rlhf data``)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.data.formats import FileRows, detect, expand, read_records
from rlhf_core.data.hub import PREFIX, load_hub_records
from rlhf_core.data.readers.containers import Record, load_records
from rlhf_core.data.schema import ROW_TYPES

HUB_ROWS = 1000


def describe_sources(files: Sequence[str], show: int = 1, base: Path | None = None) -> str:
    """Return a few lines per file.

    Args:
        files: Paths, globs or hub ids; of a hub id the first 1,000 rows are read.
        show: How many rows of each file are quoted.
        base: The folder of relative paths, by default the current one.

    Raises:
        DataError: A file cannot be read at all.
    """
    blocks = []
    for spec in files:
        if spec.startswith(PREFIX):
            blocks.append(_describe(load_hub_records(spec, HUB_ROWS), spec, show))
            continue
        for path in expand(spec, base or Path.cwd()):
            blocks.append(_describe(load_records(path), str(path), show))
    return "\n\n".join(blocks)


def _describe(records: Sequence[Record], where: str, show: int) -> str:
    shape = detect(records, where)
    kinds = [kind for kind in ROW_TYPES if kind in shape.carries]
    read = read_records(records, kinds[0], Path(where).name, "", where)
    lines = [
        where,
        f"  format   {shape.name}",
        f"  serves   {', '.join(kinds)}",
        f"  rows     {len(read.rows)} as {kinds[0]}, of {len(records)}",
        *_refusals(read),
    ]
    for row in read.rows[:show]:
        lines.append("  example  " + json.dumps(row, ensure_ascii=False))
    return "\n".join(lines)


def _refusals(read: FileRows) -> list[str]:
    """Return the reasons with their counts and the first row of each."""
    counts = Counter(row["reason"] for row in read.refused)
    first: dict[str, int] = {}
    for row in read.refused:
        first.setdefault(row["reason"], row["position"])
    return [f"  refused  {n}: {reason} (first at row {first[reason]})" for reason, n in counts.most_common()]

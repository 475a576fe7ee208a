"""What docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    """Names in the first columns of its tables."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {name for line in lines for name in re.findall(r"`([\w.]+)`", line.split("|")[1])}


def undocumented(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Fields of a history that the page does not explain. Those of reward sources carry the sources' own names."""
    fields = {name for row in rows for name in row}
    return {name for name in fields - documented() if not name.startswith("source_")}

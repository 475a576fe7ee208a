"""What is said of columns that are not read: the commonest by name, and of thousands how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LISTED_COLUMNS = 20
NAME_LENGTH = 80


def commonest_unused(unused: Mapping[str, int]) -> dict[str, int]:
    """Return the columns that most rows have something in, of equal ones the first by name; ``LISTED_COLUMNS`` at most.

    Args:
        unused: By column, how many rows have something there.
    """
    return dict(sorted(unused.items(), key=lambda item: (-item[1], item[0]))[:LISTED_COLUMNS])


def unused_summary(unused: Mapping[str, int]) -> dict[str, Any]:
    """Return ``unused``, the commonest columns as JSON has them, and ``unused_columns``, how many if there are more."""
    if len(unused) <= LISTED_COLUMNS:
        return {"unused": dict(unused)}
    return {"unused": commonest_unused(unused), "unused_columns": len(unused)}

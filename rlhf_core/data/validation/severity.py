"""What becomes of rows by the severity of the checks that they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rlhf_core.data.validation.checks import RowCheck


def split_by_severity(
    failures: Mapping[int, Sequence[str]], checks: Sequence[RowCheck]
) -> tuple[dict[int, list[str]], Counter[str]]:
    """Separate the failures that refuse a row from those that only warn.

    Args:
        failures: By row, the columns of the checks that it fails.

    Returns:
        By refused row the columns that refuse it, and by column how many rows stay in spite of it.
    """
    warning = {check.column for check in checks if check.severity == "warn"}
    refused: dict[int, list[str]] = {}
    warned: Counter[str] = Counter()
    for row, columns in failures.items():
        refusing = [column for column in columns if column not in warning]
        if refusing:
            refused[row] = refusing
        else:
            warned.update(columns)
    return refused, warned

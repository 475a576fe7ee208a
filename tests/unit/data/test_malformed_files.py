"""Every malformed or odd file is refused whole, refused in rows, or read with a note; never a traceback, never less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from unit.data.malformed.case import OddFile, RowsRead
from unit.data.malformed.corpus import ODD_FILES

from rlhf_core.config.data import DataSource
from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.errors import DataError

MESSAGE_LENGTH, REASON_LENGTH = 6000, 400


@pytest.mark.parametrize("odd", ODD_FILES, ids=lambda odd: odd.label)
def test_every_file_gives_the_expected_answer(odd: OddFile, tmp_path: Path) -> None:
    odd.write(tmp_path)
    source = DataSource(path=odd.file, **odd.options)
    if isinstance(odd.expected, str):
        with pytest.raises(DataError) as refused:
            list(read_sources([source], odd.kind, tmp_path))
        message = str(refused.value)
        assert odd.expected in message and odd.label in message
        assert len(message.encode()) < MESSAGE_LENGTH, "a message is for people, and for every terminal"
        return
    (result,) = read_sources([source], odd.kind, tmp_path)
    require_counts(result, odd)


def require_counts(result: FileRows, odd: OddFile) -> None:
    """Check that every row that was written is kept, refused or dropped, and for the expected reasons."""
    expected = odd.expected
    assert isinstance(expected, RowsRead)
    require_reasons(Counter(row.reason for row in result.refused), expected.refused)
    require_reasons(result.counts.dropped, expected.dropped)
    assert all(row.reason.encode() and len(row.reason) < REASON_LENGTH for row in result.refused)
    assert set(result.counts.unused) == set(expected.unused)
    assert result.counts.records == odd.written
    assert (len(result.rows), result.counts.expanded) == (expected.kept, expected.expanded)
    assert (
        len(result.rows) - result.counts.expanded + len(result.refused) + result.counts.dropped.total() == odd.written
    )
    positions = [*result.positions, *(row.position for row in result.refused)]
    assert all(position >= 1 for position in positions)
    assert len(set(positions)) + result.counts.dropped.total() == odd.written


def require_reasons(reasons: Mapping[str, int], expected: Mapping[str, int]) -> None:
    for part, count in expected.items():
        assert sum(n for reason, n in reasons.items() if part in reason) == count, reasons
    assert sum(reasons.values()) == sum(expected.values()), reasons

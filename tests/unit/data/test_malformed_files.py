"""Every malformed file is refused whole, refused in rows, or read with a note.

There is never a traceback, and no row is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from unit.data.malformed import containers, rows, text_files
from unit.data.malformed.case import OddFile, RowsRead
from validation_rows import collect_files, validate_raw

from rlhf_core.config.data import DataSource, FileSources
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.errors import DataError
from rlhf_core.storage.files import read_json

ODD_FILES = [*containers.FILES, *text_files.FILES, *rows.FILES]
READ = [odd for odd in ODD_FILES if isinstance(odd.expected, RowsRead)]
MESSAGE_LENGTH, REASON_LENGTH = 6000, 400


@pytest.mark.parametrize("odd", ODD_FILES, ids=lambda odd: odd.label)
def test_every_file_gives_the_expected_answer(odd: OddFile, tmp_path: Path) -> None:
    odd.write(tmp_path)
    source = DataSource(path=odd.file, **odd.options)
    if isinstance(odd.expected, str):
        with pytest.raises(DataError) as refused:
            list(read_sources([source], odd.kind, tmp_path))
        message = str(refused.value)
        assert odd.expected in message and odd.label in message and "\n" not in message
        assert len(message.encode()) < MESSAGE_LENGTH, (
            "a message is for people, and for every terminal"
        )
        return
    (result,) = read_sources([source], odd.kind, tmp_path)
    expected = odd.expected
    assert isinstance(expected, RowsRead)
    require_reasons(Counter(row.reason for row in result.refused), expected.refused)
    require_reasons(result.counts.dropped, expected.dropped)
    assert all(row.reason.encode() and len(row.reason) < REASON_LENGTH for row in result.refused)
    assert set(result.counts.unused) == set(expected.unused)
    assert result.counts.records == odd.written
    assert (len(result.rows), result.counts.expanded) == (expected.kept, expected.expanded)
    assert (
        len(result.rows)
        - result.counts.expanded
        + len(result.refused)
        + result.counts.dropped.total()
        == odd.written
    )
    positions = [*result.positions, *(row.position for row in result.refused)]
    assert all(position >= 1 for position in positions)
    assert len(set(positions)) + result.counts.dropped.total() == odd.written


def require_reasons(reasons: Mapping[str, int], expected: Mapping[str, int]) -> None:
    for part, count in expected.items():
        assert sum(n for reason, n in reasons.items() if part in reason) == count, reasons
    assert sum(reasons.values()) == sum(expected.values()), reasons


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which both stages have run over the corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    for odd in READ:
        odd.write(folder)
    sources: dict[str, list[DataSource]] = {kind: [] for kind in ROW_TYPES}
    for odd in READ:
        sources[odd.kind].append(DataSource(path=odd.file, **odd.options))
    collect_files(folder, FileSources(**sources))
    validate_raw(folder, min_rows=1, max_quarantined=1)
    return folder


@pytest.fixture(scope="module")
def quarantine(workspace: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows in the quarantine, by the file that they come from."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(workspace / "data/quarantine.parquet").to_pylist():
        found.setdefault(row["source"], []).append(row)
    return found


@pytest.mark.slow
def test_the_quarantine_names_path_line_and_reason(
    quarantine: dict[str, list[dict[str, Any]]],
) -> None:
    for odd in READ:
        expected, rows = odd.expected, quarantine.get(odd.file, [])
        assert isinstance(expected, RowsRead)
        assert all(
            row["position"] >= 1 and row["reasons"] and row["row"] and row["kind"] == odd.kind
            for row in rows
        ), odd.label
        reasons = dict(expected.refused) | dict(expected.quarantined)
        for part, count in reasons.items():
            assert sum(any(part in reason for reason in row["reasons"]) for row in rows) == count, (
                odd.label,
                rows,
            )
        assert len(rows) == sum(reasons.values()), (odd.label, rows)


@pytest.mark.slow
def test_every_written_row_is_accounted_for(
    workspace: Path, quarantine: dict[str, list[dict[str, Any]]]
) -> None:
    metrics = read_json(workspace / "metrics/data.json")
    manifest = read_json(workspace / "data/raw/manifest.json")["kinds"]
    quarantined = Counter(row["kind"] for refused in quarantine.values() for row in refused)
    for kind in ROW_TYPES:
        odd_files = {odd.file: odd for odd in READ if odd.kind == kind}
        dropped = sum(sum(about["dropped"].values()) for about in manifest[kind]["files"])
        expanded = sum(about["expanded"] for about in manifest[kind]["files"])
        written = sum(odd.written for odd in odd_files.values())
        assert metrics[kind]["clean"] + quarantined[kind] + dropped == written + expanded
        for about in manifest[kind]["files"]:
            assert set(about["unused"]) == set(odd_files[about["source"]].expected.unused)

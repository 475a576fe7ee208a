"""Collect and validate over all odd files that can be read: every row is in the clean data or in the quarantine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from unit.data.malformed.case import RowsRead
from unit.data.malformed.corpus import ODD_FILES
from validation_rows import collect_files, validate_raw

from rlhf_core.config.data import DataSource, FileSources
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.storage.files import read_json

pytestmark = pytest.mark.slow

READ = [odd for odd in ODD_FILES if isinstance(odd.expected, RowsRead)]


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
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(workspace / "data/quarantine.parquet").to_pylist():
        rows.setdefault(row["source"], []).append(row)
    return rows


def test_the_quarantine_names_path_line_and_reason(quarantine: dict[str, list[dict[str, Any]]]) -> None:
    for odd in READ:
        expected, rows = odd.expected, quarantine.get(odd.file, [])
        assert isinstance(expected, RowsRead)
        assert all(
            row["position"] >= 1 and row["reasons"] and row["row"] and row["kind"] == odd.kind for row in rows
        ), odd.label
        reasons = dict(expected.refused) | dict(expected.quarantined)
        for part, count in reasons.items():
            assert sum(any(part in reason for reason in row["reasons"]) for row in rows) == count, (odd.label, rows)
        assert len(rows) == sum(reasons.values()), (odd.label, rows)


def test_kept_and_refused_and_noted_rows_are_those_that_were_written(
    workspace: Path, quarantine: dict[str, list[dict[str, Any]]]
) -> None:
    metrics = read_json(workspace / "metrics/data.json")
    manifest = read_json(workspace / "data/raw/manifest.json")["kinds"]
    quarantined = Counter(row["kind"] for rows in quarantine.values() for row in rows)
    for kind in ROW_TYPES:
        odd_files = {odd.file: odd for odd in READ if odd.kind == kind}
        dropped = sum(sum(about["dropped"].values()) for about in manifest[kind]["files"])
        expanded = sum(about["expanded"] for about in manifest[kind]["files"])
        written = sum(odd.written for odd in odd_files.values())
        assert metrics[kind]["clean"] + quarantined[kind] + dropped == written + expanded
        for about in manifest[kind]["files"]:
            assert set(about["unused"]) == set(odd_files[about["source"]].expected.unused)

"""Rows that are read from Arrow when they are looked at are those that are read at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from unit.training.tiny import demonstrations, preferences

from rlhf_core.data import schema as row_table
from rlhf_core.data.schema import Demonstration, Preference, read_row_table, write_rows
from rlhf_core.errors import DataError


def test_rows_are_those_of_the_file_in_every_way_of_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "PART_ROWS", 7)
    path, rows = tmp_path / "rows.parquet", preferences(20)
    write_rows(path, rows)
    table = read_row_table(path, Preference)
    assert list(table) == rows and len(table) == 20
    assert [table[3], table[-1]] == [rows[3], rows[-1]]
    assert list(table[5:9]) == rows[5:9] and table[5:9][1] == rows[6]
    chosen = table.of(np.array([18, 0, 3]))
    assert list(chosen) == [rows[18], rows[0], rows[3]] and chosen[2] == rows[3]
    assert list(chosen[1:]) == [rows[0], rows[3]] and chosen[1:].rows.tolist() == [0, 3]
    with pytest.raises(IndexError):
        table[20]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", demonstrations(2))
    assert len(read_row_table(tmp_path / "rows.parquet", Demonstration)) == 2
    with pytest.raises(DataError, match="has no column chosen, rejected, margin: it is not a file of preferences"):
        read_row_table(tmp_path / "rows.parquet", Preference)

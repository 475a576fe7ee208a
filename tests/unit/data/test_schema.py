"""Rows survive the trip through parquet, and `datasets.load_dataset` reads them; ids are functions
of content.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from clean_files import write_rows
from unit.training.tiny import preferences

from rlhf_core.data import schema, tables
from rlhf_core.data.dataset import file_names, write_readme
from rlhf_core.data.schema import (
    Demonstration,
    Message,
    Preference,
    PretrainText,
    Prompt,
    as_dict,
    content_id,
    read_row_table,
    read_rows,
)
from rlhf_core.errors import DataError

PROMPT = [Message("system", "be kind"), Message("user", "你好 \U0001f600")]
PREFERENCE = Preference("a", PROMPT, "yes", "no", 0.25, "c", "s", "g")
ROWS = [
    PREFERENCE,
    Demonstration("b", PROMPT, "yes", "c", "s", "g"),
    Prompt("c", PROMPT, "c", "s", "g"),
    PretrainText("d", "text", "c", "s", "g"),
]


def test_wrong_kind_missing_and_broken_files_are_users_errors(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.parquet", [ROWS[3]])
    with pytest.raises(
        DataError, match=r"no column prompt, chosen, .*: it is not a clean file of preferences"
    ):
        read_rows(tmp_path / "x.parquet", Preference)
    with pytest.raises(DataError, match="does not exist"):
        read_rows(tmp_path / "none.parquet", Preference)
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match="not a readable parquet"):
        read_rows(tmp_path / "bad.parquet", Preference)


def test_id_depends_on_content_alone() -> None:
    row = as_dict(PREFERENCE)
    assert content_id("preferences", row) == content_id(
        "preferences", row | {"source": "other", "id": "z"}
    )
    assert content_id("preferences", row) != content_id(
        "preferences", row | {"chosen": "no", "rejected": "yes"}
    )
    assert len(content_id("preferences", row)) == 16


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.KIND)
def test_more_text_than_an_array_holds_is_written_in_parts(
    row: Preference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 200)
    rows = [replace(row, id=str(i)) for i in range(20)]
    write_rows(tmp_path / "x.parquet", rows)
    assert read_rows(tmp_path / "x.parquet", type(row)) == rows
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"], "no temporary file is left"
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups > 1


def test_rows_are_those_of_the_file_in_every_way_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PART_ROWS", 7)
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


TURNS = [Message("user", "what color is the lamp?")]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean folder with a row in each file, whose texts are the file's name."""
    folder = tmp_path_factory.mktemp("clean")
    for name in file_names():
        labels = ("", "", "")
        rows = {
            "preferences": Preference("1", TURNS, name, name, None, *labels),
            "demonstrations": Demonstration("1", TURNS, name, *labels),
            "prompts": Prompt("1", TURNS, *labels),
            "pretrain": PretrainText("1", name, *labels),
        }
        write_rows(folder / f"{name}.parquet", [rows[name.split("/")[0].partition("_")[0]]])
    write_readme(folder)
    return folder


def test_every_kind_is_a_config_of_conversations_and_pairs_are_the_default(
    clean: Path, tmp_path: Path
) -> None:
    from datasets import get_dataset_config_names, load_dataset

    def reply(name: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": name}]

    prompt = [{"role": "user", "content": TURNS[0].content}]
    assert set(get_dataset_config_names(str(clean))) == {
        name.split("/")[0] for name in file_names()
    }
    pairs = load_dataset(str(clean), cache_dir=str(tmp_path))
    assert set(pairs) == {"train", "validation", "test"}
    expected = {name: reply("preferences/test") for name in ("chosen", "rejected")} | {
        "prompt": prompt
    }
    assert pairs["test"].select_columns([*expected])[0] == expected
    assert "margin" not in pairs["test"].column_names, (
        "RewardTrainer would take it, and stop where one is null"
    )
    judge = load_dataset(str(clean), "preferences_judge", cache_dir=str(tmp_path))
    assert set(judge) == {"train", "validation"} and judge["train"][0]["prompt"] == prompt
    imitated = load_dataset(str(clean), "demonstrations", cache_dir=str(tmp_path))
    assert imitated["train"][0]["completion"] == reply("demonstrations/train")

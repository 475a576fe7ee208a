"""Every row and every refused row is known by file and line, also among files of one name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from validation_rows import collect_files, validate_raw

from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.storage.files import read_json


def pair(text: str) -> dict[str, Any]:
    return {"prompt": f"Question {text}?", "chosen": f"good {text}", "rejected": f"bad {text}"}


def write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def collected(workspace: Path, files: str, **settings: Any) -> Path:
    collect_files(workspace, {"preferences": [files]}, **settings)
    return workspace / "data/raw"


def two_folders(workspace: Path, **settings: Any) -> Path:
    """Collect two files of one name; in each the first line is blank and one row is bad for another reason."""
    write(workspace / "a/pairs.jsonl", ["", *[pair(f"a{i}") for i in range(100)], "{"])
    write(workspace / "b/pairs.jsonl", ["", *[pair(f"b{i}") for i in range(100)], pair("b") | {"chosen": "\x00 x"}])
    return collected(workspace, "*/pairs.jsonl", **settings)


@pytest.mark.slow
def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    raw, (_, outputs) = two_folders(tmp_path), validate_raw(tmp_path)
    manifest = read_json(raw / "manifest.json")["kinds"]["preferences"]
    assert [file["source"] for file in manifest["files"]] == ["a/pairs.jsonl", "b/pairs.jsonl"]
    rows = pq.read_table(raw / "preferences/data.parquet").to_pylist()
    assert {row["source"] for row in rows} == {"a/pairs.jsonl", "b/pairs.jsonl"}
    quarantined = pq.read_table(outputs.quarantine).to_pylist()
    where = {(row["kind"], row["source"], row["position"]) for row in quarantined}
    assert where == {("preferences", "a/pairs.jsonl", 102)} | {(kind, "b/pairs.jsonl", 102) for kind in ROW_TYPES}
    assert all(row["reasons"] for row in quarantined)
    assert {row["id"] for row in quarantined if row["source"] == "a/pairs.jsonl"} == {"a/pairs.jsonl:102"}


@pytest.mark.slow
def test_every_row_of_the_clean_data_leads_to_its_line(tmp_path: Path) -> None:
    raw, (_, outputs) = two_folders(tmp_path), validate_raw(tmp_path)
    origins: dict[tuple[str, str], Mapping[str, Any]] = {}
    for origin in pq.read_table(raw / "provenance.parquet").to_pylist():
        origins.setdefault((origin["kind"], origin["id"]), origin)
    texts = {"preferences": "chosen", "demonstrations": "completion", "prompts": "group", "pretrain": "text"}
    read = 0
    for path in outputs.clean.glob("*/*.parquet"):
        kind = path.parent.name.split("_")[0]
        for row in pq.read_table(path).to_pylist():
            origin = origins[kind, row["id"]]
            line = (tmp_path / origin["source"]).read_text().split("\n")[origin["position"] - 1]
            text = row[texts[kind]]
            text = (text if isinstance(text, str) else text[0]["content"]).split("\n")[-1].lower()
            assert text in line.lower(), (kind, row, origin)
            read += 1
    assert read > 700


def test_a_row_that_names_its_own_source_still_leads_to_its_line(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", [pair(str(i)) | {"source": "annotators"} for i in range(60)])
    raw = collected(tmp_path, "x.jsonl")
    assert pq.read_table(raw / "preferences/data.parquet").column("source").to_pylist() == ["annotators"] * 60
    origins = [row for row in pq.read_table(raw / "provenance.parquet").to_pylist() if row["kind"] == "preferences"]
    assert [(row["source"], row["position"]) for row in origins] == [("x.jsonl", i) for i in range(1, 61)]


def test_rows_of_a_limit_keep_their_lines(tmp_path: Path) -> None:
    raw = two_folders(tmp_path, limit=40)
    origins = [row for row in pq.read_table(raw / "provenance.parquet").to_pylist() if row["kind"] == "preferences"]
    expected = [(f"{folder}/pairs.jsonl", line) for folder in "ab" for line in range(2, 22)]
    assert [(row["source"], row["position"]) for row in origins] == expected

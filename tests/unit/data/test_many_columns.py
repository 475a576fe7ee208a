"""Files with thousands of columns that are not read: the commonest are named, the others counted."""

from __future__ import annotations

import json
from pathlib import Path

from validation_rows import collect_files

from rlhf_core.data.inspection.describe import as_json_value, as_text, describe_sources
from rlhf_core.storage.files import read_json


def test_many_unused_columns_are_counted(tmp_path: Path) -> None:
    pair = {"prompt": "Q?", "chosen": "a", "rejected": "b"}
    wide = pair | {f"column {i}": 1 for i in range(1000)}
    rows = [wide, pair | {"column 7": 1, "n" * 500: 1}]
    (tmp_path / "wide.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    collect_files(tmp_path, {"preferences": ["wide.jsonl"]})
    (file,) = read_json(tmp_path / "data/raw/manifest.json")["kinds"]["preferences"]["files"]
    assert len(file["unused"]) == 20 and file["unused_columns"] == 1001
    assert file["unused"]["column 7"] == 2
    described = describe_sources(["wide.jsonl"], tmp_path)
    lines = as_text(described).splitlines()
    assert sum("is not read" in line for line in lines) == 20
    assert "  unused   981 further columns are not read" in lines
    (value,) = as_json_value(described)["files"]
    assert (value["unused"], value["unused_columns"]) == (file["unused"], 1001)


def test_the_names_of_columns_are_cut(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "once", "n" * 500: 1}))
    (file,) = describe_sources(["long.jsonl"], tmp_path).files
    assert list(file.counts.unused) == ["n" * 80]

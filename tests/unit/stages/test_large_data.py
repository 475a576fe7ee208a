"""Data in parts gives what data in one piece gave: rows, quarantine, provenance, manifest, metrics and gate."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from validation_rows import collect_files, validate_raw

from rlhf_core.data.schema import plain_table

# What the stages wrote when they held all rows at once: by case and file of rows, a hash of its values.
RECORDED: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "large_data.json").read_text())
CASES: dict[str, dict[str, Any]] = {
    "all": {"files": {"preferences": ["pairs.jsonl.gz", "rankings.jsonl", {"path": "pairs.csv", "cap": 31}]}},
    "limit": {
        "files": {
            "preferences": ["pairs.jsonl.gz", {"path": "rankings.jsonl", "weight": 2}, {"path": "pairs.csv", "cap": 31}]
        },
        "limit": 307,
    },
    "given": {
        "files": {
            "preferences": ["pairs.csv"],
            "demonstrations": ["replies.parquet"],
            "prompts": ["pairs.jsonl.gz"],
        },
    },
}
KEY = "ghp_" + "a" * 36


def pairs(count: int) -> Iterator[Any]:
    """Pairs of few prompts, with copies, contradictions and faults of every sort."""
    draw = random.Random(1)
    for i in range(count):
        row = {"prompt": f"Question {draw.randrange(count // 3)}?", "chosen": f"good {i}", "rejected": f"bad {i}"}
        yield row
        fault = draw.randrange(24)
        if fault == 0:
            yield row
        elif fault == 1:
            yield row | {"chosen": row["rejected"], "rejected": f" {row['chosen']}  "}
        elif fault == 2:
            yield row | {"chosen": ""}
        elif fault == 3:
            yield row | {"rejected": f"\x00 {KEY}", "margin": "much"} if i % 2 else row | {"rejected": f"\x00 {KEY}"}
        elif fault == 4:
            yield {"bad": i}
        elif fault == 5:
            yield row | {"chosen": "long " * 2000, "margin": i / 7, "category": "c", "source": "elsewhere"}


def write_sources(folder: Path) -> None:
    """Write the files that the cases name; JSON lines have more records than are read at once."""
    lines = [json.dumps(row) for row in pairs(2500)]
    lines[7] = '{"prompt": '
    (folder / "pairs.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    rankings = [
        {"prompt": f"Question {i % 40}?", "responses": [f"r{i % 50} {j}" for j in range(4)], "ranks": [2, 0, 3, i % 4]}
        for i in range(120)
    ]
    (folder / "rankings.jsonl").write_text("\n".join(map(json.dumps, rankings)))
    cells = [["prompt", "chosen", "rejected"], *([f"Cell {i}?", f"yes {i}", f'"no"\n{i}'] for i in range(400))]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in cells]
    (folder / "pairs.csv").write_text("\n".join(quoted))
    replies = [{"prompt": f"Cell {i % 90}?", "completion": f"reply {i % 130}"} for i in range(140)]
    pq.write_table(pa.Table.from_pylist(replies), folder / "replies.parquet", row_group_size=17)


def run(case: str, workspace: Path) -> dict[str, str]:
    """Run both stages and return a hash of the values in each file."""
    write_sources(workspace)
    raw = workspace / "data/raw"
    collect_files(workspace, **CASES[case])
    _, outputs = validate_raw(workspace, max_quarantined=0.9)
    folders = [raw, *(path for name, path in outputs.items() if name != "docs")]
    files = [file for path in folders for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    kept = [file for file in files if file.suffix in (".parquet", ".json")]
    return {str(file.relative_to(workspace)): values_hash(file) for file in kept}


def values_hash(path: Path) -> str:
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        if path.parents[1].name == "clean":
            table = plain_table(path, path.parent.name.partition("_")[0], table)
        content = repr((table.schema.remove_metadata().to_string(), table.to_pylist()))
    else:
        # Their hashes depend on the row groups.
        content = json.dumps(json.loads(path.read_text(), object_hook=without_file_hash), sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def without_file_hash(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if not (name == "sha256" and "derived_from" in value)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_data_in_parts_is_what_it_was_in_one_piece(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.data.tables.ROW_GROUP_ROWS", 100)
    monkeypatch.setattr("rlhf_core.data.tables.CHUNK_ROWS", 37)
    monkeypatch.setattr("rlhf_core.data.collection.rows.CHUNK_RECORDS", 1000)
    monkeypatch.setattr("rlhf_core.data.tables.CHUNK_BYTES", 50_000)  # which a hundred rows or so fill
    in_parts = run(case, tmp_path)
    assert {name: in_parts[name] for name in RECORDED[case]} == RECORDED[case]
    assert pq.ParquetFile(tmp_path / "data/raw/prompts/data.parquet").num_row_groups > 1
    assert not list((tmp_path / "data/raw").rglob("source-*"))
    if case == "all":
        monkeypatch.undo()
        (tmp_path / "whole").mkdir()
        assert run(case, tmp_path / "whole") == in_parts, "quarantine, manifest, metrics and gate are the same too"

"""Large data and real data through both stages: parts give what one piece gives, and every row is
accounted for.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import SHARED_DATA
from validation_rows import collect_files, validate_raw

from rlhf_core.data.schema import ROW_TYPES, plain_table
from rlhf_core.storage.files import read_json

CASES: dict[str, dict[str, Any]] = {
    "derived": {
        "files": {
            "preferences": ["pairs.jsonl.gz", "rankings.jsonl", {"path": "pairs.csv", "cap": 31}]
        }
    },
    "limit": {
        "files": {
            "preferences": [
                "pairs.jsonl.gz",
                {"path": "rankings.jsonl", "weight": 2},
                {"path": "pairs.csv", "cap": 31},
            ]
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
        row = {
            "prompt": f"Question {draw.randrange(count // 3)}?",
            "chosen": f"good {i}",
            "rejected": f"bad {i}",
        }
        yield row
        fault = draw.randrange(24)
        if fault == 0:
            yield row
        elif fault == 1:
            yield row | {"chosen": row["rejected"], "rejected": f" {row['chosen']}  "}
        elif fault == 2:
            yield row | {"chosen": ""}
        elif fault == 3:
            yield (
                row | {"rejected": f"\x00 {KEY}", "margin": "much"}
                if i % 2
                else row | {"rejected": f"\x00 {KEY}"}
            )
        elif fault == 4:
            yield {"bad": i}
        elif fault == 5:
            yield row | {
                "chosen": "long " * 2000,
                "margin": i / 7,
                "category": "c",
                "source": "elsewhere",
            }


def write_sources(folder: Path) -> None:
    """Write the files that the cases name; JSON lines have more records than are read at once."""
    lines = [json.dumps(row) for row in pairs(2500)]
    lines[7] = '{"prompt": '
    (folder / "pairs.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    rankings = [
        {
            "prompt": f"Question {i % 40}?",
            "responses": [f"r{i % 50} {j}" for j in range(4)],
            "ranks": [2, 0, 3, i % 4],
        }
        for i in range(120)
    ]
    (folder / "rankings.jsonl").write_text("\n".join(map(json.dumps, rankings)))
    cells = [
        ["prompt", "chosen", "rejected"],
        *([f"Cell {i}?", f"yes {i}", f'"no"\n{i}'] for i in range(400)),
    ]
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
    files = [
        file for path in folders for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ]
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
        content = json.dumps(
            json.loads(path.read_text(), object_hook=without_file_hash), sort_keys=True
        )
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def without_file_hash(value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: item
        for name, item in value.items()
        if not (name == "sha256" and "derived_from" in value)
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_data_in_parts_is_what_it_is_in_one_piece(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.data.tables.ROW_GROUP_ROWS", 100)
    monkeypatch.setattr("rlhf_core.data.tables.CHUNK_ROWS", 37)
    monkeypatch.setattr("rlhf_core.data.collection.rows.CHUNK_RECORDS", 1000)
    monkeypatch.setattr(
        "rlhf_core.data.tables.CHUNK_BYTES", 50_000
    )  # which a hundred rows or so fill
    in_parts = run(case, tmp_path)
    assert pq.ParquetFile(tmp_path / "data/raw/prompts/data.parquet").num_row_groups > 1
    assert not list((tmp_path / "data/raw").rglob("source-*"))
    monkeypatch.undo()
    (tmp_path / "whole").mkdir()
    assert run(case, tmp_path / "whole") == in_parts, (
        "quarantine, manifest, metrics and gate are the same too"
    )


HH, EVAL = "hh_rlhf_harmless.sample.jsonl.gz", "alpaca_eval_pairs.conversational.jsonl.gz"
EN, ZH = "llama_factory_dpo_en.json", "llama_factory_dpo_zh.json"
ALPACA, MOSS = "alpaca_en.json", "moss_rlhf_ppo.json"
COPY, CONTROL = "the same texts as an earlier row", "control or replacement characters"
MOJIBAKE = "text decoded with the wrong encoding (mojibake)"
# Of every file, the rows in it and how many are refused for which reasons together.
PAIRS = {
    HH: (400, {("the final reply of chosen is empty",): 1}),
    EVAL: (
        10901,
        {
            ("rejected is empty",): 6,
            ("chosen is over 8000 characters",): 3,
            ("rejected is over 8000 characters",): 2,
        },
    ),
    EN: (300, {(COPY,): 5, (CONTROL, MOJIBAKE): 1}),
    ZH: (300, {(COPY,): 11, (CONTROL,): 6}),
}

needs_shared_data = pytest.mark.skipif(
    not SHARED_DATA.is_dir(), reason=f"there is no third-party data in {SHARED_DATA}"
)


def clean_counts(folder: Path, **files: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Run both stages over ``files``, by kind; return by kind how many rows were read or derived,
    and are clean.
    """
    sources = {kind: [str(SHARED_DATA / name) for name in names] for kind, names in files.items()}
    collect_files(folder, sources)
    metrics, outputs = validate_raw(folder, min_rows=30)
    quarantined = Counter(row["kind"] for row in pq.read_table(outputs.quarantine).to_pylist())
    counts = {kind: (int(metrics[kind]["raw"]), int(metrics[kind]["clean"])) for kind in ROW_TYPES}
    assert all(rows == clean + quarantined[kind] for kind, (rows, clean) in counts.items())
    return counts


def require_reasons(folder: Path, *names: str) -> None:
    """Check what each file of pairs holds, and how many of its rows are refused for which
    reasons.
    """
    rows = pq.read_table(folder / "data/quarantine.parquet").to_pylist()
    about = read_json(folder / "data/raw/manifest.json")["kinds"]["preferences"]["files"]
    for name in names:
        of_file = [
            row for row in rows if row["kind"] == "preferences" and Path(row["source"]).name == name
        ]
        written, reasons = PAIRS[name]
        assert Counter(tuple(row["reasons"]) for row in of_file) == reasons
        assert all(row["position"] >= 1 for row in of_file)
        (file,) = (file for file in about if Path(file["source"]).name == name)
        assert (file["records"], file["expanded"], file["dropped"], file["unused"]) == (
            written,
            0,
            {},
            {},
        )


@pytest.mark.slow
@needs_shared_data
def test_demonstrations_and_prompts_of_their_own(tmp_path: Path) -> None:
    counts = clean_counts(tmp_path, preferences=(HH,), demonstrations=(ALPACA,), prompts=(MOSS,))
    assert counts == {
        "preferences": (400, 399),
        "demonstrations": (999, 985),
        "prompts": (31, 31),
        "pretrain": (985, 985),
    }
    rows = pq.read_table(tmp_path / "data/quarantine.parquet").to_pylist()
    assert Counter(tuple(row["reasons"]) for row in rows if row["kind"] == "demonstrations") == {
        (COPY,): 14
    }


@pytest.mark.slow
@needs_shared_data
def test_pairs_and_what_is_derived_of_them(tmp_path: Path) -> None:
    assert clean_counts(tmp_path, preferences=(HH, EVAL, EN, ZH)) == {
        "preferences": (11901, 11866),
        "demonstrations": (2992, 2982),
        "prompts": (1788, 1781),
        "pretrain": (2992, 2982),
    }
    require_reasons(tmp_path, HH, EVAL, EN, ZH)

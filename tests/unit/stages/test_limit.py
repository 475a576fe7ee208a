"""``collect.limit``: shares, cut rows and refusals are counted, and every row is known by its file
and line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from validation_rows import collect_files, validate_raw

from rlhf_core.config.data import CollectConfig
from rlhf_core.data.collection.raw_folder import fair_shares
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.storage.files import read_json


def pair(text: str) -> dict[str, Any]:
    return {"prompt": f"Question {text}?", "chosen": f"good {text}", "rejected": f"bad {text}"}


def pairs(name: str, count: int) -> list[dict[str, Any]]:
    return [pair(f"{name}{i}") for i in range(count)]


def write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def collected(workspace: Path, *files: Any, **settings: Any) -> Path:
    collect_files(workspace, {"preferences": [*files]}, **settings)
    return workspace / "data/raw"


@pytest.mark.parametrize(
    ("sizes", "limit", "weights", "shares"),
    [
        ([10, 10], None, None, [10, 10]),
        ([10, 10], 30, None, [10, 10]),
        ([10, 10], 7, None, [4, 3]),
        ([2, 10, 10], 12, None, [2, 5, 5]),
        ([100, 1, 0, 3], 10, None, [6, 1, 0, 3]),
        ([5, 5, 5], 2, None, [1, 1, 0]),
        ([], 5, None, []),
        ([100, 100], 40, [3, 1], [30, 10]),
        ([10, 100], 40, [3, 1], [10, 30]),
        ([100, 100, 100], 4, [1, 1, 2], [1, 1, 2]),
        ([100, 100], 1, [0.5, 2], [0, 1]),
        ([5, 5], None, [3, 1], [5, 5]),
        ([100, 100, 100], 100, [0.1, 0.2, 0.7], [10, 20, 70]),
    ],
)
def test_shares(
    sizes: list[int], limit: int | None, weights: list[float] | None, shares: list[int]
) -> None:
    assert fair_shares(sizes, limit, weights or [1.0] * len(sizes)) == shares


def test_a_mixture_by_weight_and_cap_is_recorded(tmp_path: Path) -> None:
    for name, count in (("a", 50), ("b", 3), ("c", 50)):
        write(tmp_path / f"{name}.jsonl", pairs(name, count))
    sources = [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl"}, {"path": "c.jsonl", "cap": 2}]
    metrics = collect_files(tmp_path, {"preferences": sources}, limit=14)
    raw = tmp_path / "data/raw"
    about = read_json(raw / "manifest.json")["kinds"]["preferences"]
    names = ("records", "rows", "refused", "cut", "weight", "cap", "share")
    assert [tuple(file[name] for name in names) for file in about["files"]] == [
        (50, 9, 0, 41, 3.0, None, 9 / 14),
        (3, 3, 0, 0, 1.0, None, 3 / 14),
        (50, 2, 0, 48, 1.0, 2, 2 / 14),
    ]
    assert about["cut"] == 89 and (metrics["preferences_rows"], metrics["cut_rows"]) == (14, 89)
    rows = pq.read_table(raw / "preferences/data.parquet").to_pylist()
    expected = [
        f"Question {name}{i}?"
        for name, count in (("a", 9), ("b", 3), ("c", 2))
        for i in range(count)
    ]
    assert [row["prompt"][0]["content"] for row in rows] == expected
    prompts = pq.read_table(raw / "prompts/data.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in prompts] == expected, (
        "derived of the rows that stay"
    )


def test_a_weight_without_a_limit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the weight of a\.jsonl is a share of collect\.limit, which is not set"
    ):
        CollectConfig.model_validate(
            {"files": {"preferences": [{"path": "a.jsonl", "weight": 2.5}]}}
        )


@pytest.mark.slow
def test_refusals_of_validation_count_for_the_cut_rows_too(tmp_path: Path) -> None:
    """Half of the kept rows fail: so would half of the cut ones, and with 100 refused of 600 that
    is 7 / 12.
    """
    rows = [row | {"chosen": ""} if i % 2 else row for i, row in enumerate(pairs("a", 500))]
    write(tmp_path / "a.jsonl", [*rows, *[{"bad": i} for i in range(100)]])
    collected(tmp_path, "a.jsonl", limit=200)
    metrics, _ = validate_raw(tmp_path, max_quarantined=0.99)
    numbers = metrics["preferences"]
    assert (numbers["clean"], numbers["quarantined"], numbers["cut"]) == (100, 200, 300)
    assert numbers["quarantined_share"] == pytest.approx((100 + 250) / 600)


def two_folders(workspace: Path, **settings: Any) -> Path:
    """Collect two files of one name; in each the first line is blank and one row is bad for another
    reason.
    """
    write(workspace / "a/pairs.jsonl", ["", *[pair(f"a{i}") for i in range(100)], "{"])
    write(
        workspace / "b/pairs.jsonl",
        ["", *[pair(f"b{i}") for i in range(100)], pair("b") | {"chosen": "\x00 x"}],
    )
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
    assert where == {("preferences", "a/pairs.jsonl", 102)} | {
        (kind, "b/pairs.jsonl", 102) for kind in ROW_TYPES
    }
    assert all(row["reasons"] for row in quarantined)
    assert {row["id"] for row in quarantined if row["source"] == "a/pairs.jsonl"} == {
        "a/pairs.jsonl:102"
    }


@pytest.mark.slow
def test_every_row_of_the_clean_data_leads_to_its_line(tmp_path: Path) -> None:
    raw, (_, outputs) = two_folders(tmp_path), validate_raw(tmp_path)
    origins: dict[tuple[str, str], Mapping[str, Any]] = {}
    for origin in pq.read_table(raw / "provenance.parquet").to_pylist():
        origins.setdefault((origin["kind"], origin["id"]), origin)
    texts = {
        "preferences": "chosen",
        "demonstrations": "completion",
        "prompts": "group",
        "pretrain": "text",
    }
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
    assert (
        pq.read_table(raw / "preferences/data.parquet").column("source").to_pylist()
        == ["annotators"] * 60
    )
    origins = [
        row
        for row in pq.read_table(raw / "provenance.parquet").to_pylist()
        if row["kind"] == "preferences"
    ]
    assert [(row["source"], row["position"]) for row in origins] == [
        ("x.jsonl", i) for i in range(1, 61)
    ]


def test_rows_of_a_limit_keep_their_lines(tmp_path: Path) -> None:
    raw = two_folders(tmp_path, limit=40)
    origins = [
        row
        for row in pq.read_table(raw / "provenance.parquet").to_pylist()
        if row["kind"] == "preferences"
    ]
    expected = [(f"{folder}/pairs.jsonl", line) for folder in "ab" for line in range(2, 22)]
    assert [(row["source"], row["position"]) for row in origins] == expected

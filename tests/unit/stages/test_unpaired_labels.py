"""Unpaired replies with labels (KTO): good ones are imitated, and the prompts of bad ones are used as prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from validation_rows import collect_files

from rlhf_core.config.data import ReadOptions, ValidateConfig
from rlhf_core.data.collection.sources import sources_by_kind
from rlhf_core.stages.checked_files import as_text, check_files
from rlhf_core.storage.files import read_json

REASON = "the reply is labelled false: nothing to imitate"


def labelled(count: int) -> list[dict[str, Any]]:
    """Rows whose labels are true and false by turns."""
    return [{"prompt": f"Labelled {i}?", "completion": f"reply {i}", "label": i % 2 == 0} for i in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def contents(raw: Path, kind: str) -> list[str]:
    return [row["prompt"][-1]["content"] for row in pq.read_table(raw / kind / "data.parquet").to_pylist()]


@pytest.mark.slow
def test_a_false_label_is_no_bad_row_and_its_prompt_is_a_prompt(tmp_path: Path) -> None:
    pairs = [{"prompt": f"Pair {i}?", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(60)]
    rows = labelled(60)
    rows[0]["completion"] = "un caf\u00c3\u00a9"  # Refused for its text; labelled true, so its prompt goes with it.
    rows[2] |= {"prompt": "Labelled 3?", "completion": "un th\u00c3\u00a9"}  # Refused; the prompt is also that of 3.
    files = write(tmp_path / "pairs.jsonl", pairs), write(tmp_path / "kto.jsonl", rows)
    sources = sources_by_kind(files, tmp_path, ReadOptions())
    checked = check_files(sources, tmp_path, ValidateConfig(min_rows=20), tmp_path / "out")
    (_, file) = checked.files
    assert (file.records, file.kept, file.refused, dict(file.dropped)) == (60, 28, 2, {REASON: 30})
    assert checked.kinds["demonstrations"] == {"raw": 30, "clean": 28}
    # Those of 60 pairs, 30 bad replies and 28 good ones that stay.
    assert checked.kinds["prompts"] == {"raw": 119, "clean": 118}
    assert "quarantined_share" not in as_text(checked), "few rows are bad, so none of these conditions fails"
    refused = pq.read_table(tmp_path / "out/data/quarantine.parquet").to_pylist()
    assert [row["position"] for row in refused if row["kind"] == "prompts"] == [1]


@pytest.mark.parametrize(
    ("cap", "limit", "replies", "prompts"),
    [
        # The prompts that a good reply gives come first; those of bad ones follow.
        (None, None, [0, 2, 4, 6, 8], [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]),
        (3, None, [0, 2, 4], [0, 2, 4, 1, 3]),
        (None, 4, [0, 2, 4, 6], [0, 2, 4, 6]),
        (2, 7, [0, 2], [0, 2, 1]),
    ],
)
def test_prompts_of_bad_replies_keep_to_caps_and_limits(
    tmp_path: Path, cap: int | None, limit: int | None, replies: list[int], prompts: list[int]
) -> None:
    write(tmp_path / "kto.jsonl", labelled(10))
    write(tmp_path / "pairs.jsonl", [{"prompt": "Labelled 0?", "chosen": "a", "rejected": "b"}])
    files = {"preferences": ("pairs.jsonl",), "demonstrations": ({"path": "kto.jsonl", "cap": cap},)}
    collect_files(tmp_path, files, limit=limit)
    raw = tmp_path / "data/raw"
    assert contents(raw, "demonstrations") == [f"Labelled {i}?" for i in replies]
    assert contents(raw, "prompts") == [f"Labelled {i}?" for i in prompts]
    (file,) = read_json(raw / "manifest.json")["kinds"]["demonstrations"]["files"]
    assert file["dropped"] == {REASON: 5} and file["records"] == file["rows"] + file["cut"] + 5
    assert not list(raw.glob("*/prompts-*.parquet"))


def test_prompts_that_are_given_are_not_added_to(tmp_path: Path) -> None:
    write(tmp_path / "kto.jsonl", labelled(10))
    write(tmp_path / "pairs.jsonl", [{"prompt": "Q?", "chosen": "a", "rejected": "b"}])
    write(tmp_path / "prompts.jsonl", [{"prompt": "P?"}])
    files = {"preferences": ["pairs.jsonl"], "demonstrations": ["kto.jsonl"], "prompts": ["prompts.jsonl"]}
    collect_files(tmp_path, files)
    raw = tmp_path / "data/raw"
    assert contents(raw, "prompts") == ["P?"]
    assert not (raw / "prompt_only.parquet").exists()

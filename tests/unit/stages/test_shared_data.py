"""All files of the shared third-party data, read, collected and validated: what became of every row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from commands import SHARED_DATA
from validation_rows import collect_files, validate_raw

from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.storage.files import read_json

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

pytestmark = [
    pytest.mark.skipif(not SHARED_DATA.is_dir(), reason=f"there is no third-party data in {SHARED_DATA}"),
    pytest.mark.slow,
]


def clean_counts(folder: Path, **files: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Run both stages over ``files``, by kind; return by kind how many rows were read or derived, and are clean."""
    sources = {kind: [str(SHARED_DATA / name) for name in names] for kind, names in files.items()}
    collect_files(folder, sources)
    metrics, outputs = validate_raw(folder, min_rows=30)
    quarantined = Counter(row["kind"] for row in pq.read_table(outputs.quarantine).to_pylist())
    counts = {kind: (int(metrics[kind]["raw"]), int(metrics[kind]["clean"])) for kind in ROW_TYPES}
    assert all(rows == clean + quarantined[kind] for kind, (rows, clean) in counts.items())
    return counts


def require_reasons(folder: Path, *names: str) -> None:
    """Check what each file of pairs holds, and how many of its rows are refused for which reasons."""
    rows = pq.read_table(folder / "data/quarantine.parquet").to_pylist()
    about = read_json(folder / "data/raw/manifest.json")["kinds"]["preferences"]["files"]
    for name in names:
        of_file = [row for row in rows if row["kind"] == "preferences" and Path(row["source"]).name == name]
        written, reasons = PAIRS[name]
        assert Counter(tuple(row["reasons"]) for row in of_file) == reasons
        assert all(row["position"] >= 1 for row in of_file)
        (file,) = (file for file in about if Path(file["source"]).name == name)
        assert (file["records"], file["expanded"], file["dropped"], file["unused"]) == (written, 0, {}, {})


def test_demonstrations_and_prompts_of_their_own(tmp_path: Path) -> None:
    counts = clean_counts(tmp_path, preferences=(HH,), demonstrations=(ALPACA,), prompts=(MOSS,))
    assert counts == {
        "preferences": (400, 399),
        "demonstrations": (999, 985),
        "prompts": (31, 31),
        "pretrain": (985, 985),
    }
    rows = pq.read_table(tmp_path / "data/quarantine.parquet").to_pylist()
    assert Counter(tuple(row["reasons"]) for row in rows if row["kind"] == "demonstrations") == {(COPY,): 14}


def test_pairs_and_what_is_derived_of_them(tmp_path: Path) -> None:
    assert clean_counts(tmp_path, preferences=(HH, EVAL, EN, ZH)) == {
        "preferences": (11901, 11866),
        "demonstrations": (2992, 2982),
        "prompts": (1788, 1781),
        "pretrain": (2992, 2982),
    }
    require_reasons(tmp_path, HH, EVAL, EN, ZH)

"""Files of a kind beside rows that are derived: what is added, what each source gives, and what
labels leave out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from validation_rows import collect_files, validate_raw

from rlhf_core.config.data import CollectConfig, ReadOptions, ValidateConfig
from rlhf_core.data.collection.sources import sources_by_kind
from rlhf_core.data.schema import (
    Demonstration,
    Preference,
    PretrainText,
    Prompt,
    read_table,
    rows_of_table,
)
from rlhf_core.storage.files import read_json
from rlhf_extras.data_files.checked_files import as_text, check_files

KINDS = {
    "preferences": Preference,
    "demonstrations": Demonstration,
    "prompts": Prompt,
    "pretrain": PretrainText,
}


def write(folder: Path, name: str, rows: list[Any]) -> str:
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return name


def pair(prompt: str, chosen: str, rejected: str = "no") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def collected(
    folder: Path, files: dict[str, Any], **more: Any
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The rows of each kind, and what the manifest says of the kinds."""
    collect_files(folder, files, **more)
    raw = folder / "data/raw"
    rows = {
        kind: list(rows_of_table(read_table(raw / kind / "data.parquet"), cls))
        for kind, cls in KINDS.items()
    }
    return rows, read_json(raw / "manifest.json")["kinds"]


def test_files_of_a_kind_are_added_to_what_is_derived(tmp_path: Path) -> None:
    write(tmp_path, "pairs.jsonl", [pair("Q1?", "a"), pair("Q2?", "b")])
    # The second row is what the second pair gives too: it stays once, with the label of the file.
    own = [{"prompt": "Q3?", "reply": "c"}, {"prompt": "Q2?", "reply": "b", "category": "ours"}]
    write(tmp_path, "own.jsonl", own)
    write(tmp_path, "prompts.jsonl", [{"prompt": "Q4?"}])
    files = {
        "preferences": ["pairs.jsonl"],
        "demonstrations": ["own.jsonl"],
        "prompts": ["prompts.jsonl"],
    }
    rows, about = collected(tmp_path, files, also_derive=["demonstrations", "prompts"])
    assert [(row.reply, row.category) for row in rows["demonstrations"]] == [
        ("c", "general"), ("b", "ours"), ("a", "general"),
    ]  # fmt: skip
    assert [row.prompt[0].content for row in rows["prompts"]] == ["Q4?", "Q3?", "Q2?", "Q1?"]
    assert sorted(row.text for row in rows["pretrain"]) == ["Q1?\na", "Q2?\nb", "Q3?\nc"]
    given = about["demonstrations"]
    assert (given["rows"], given["derived_rows"]) == (3, 1)
    assert (given["derived_from"], given["files"][0]["share"]) == (
        "preferences",
        pytest.approx(2 / 3),
    )
    assert "derived_rows" not in about["pretrain"]


def test_without_it_files_replace_what_is_derived(tmp_path: Path) -> None:
    write(tmp_path, "pairs.jsonl", [pair("Q1?", "a")])
    write(tmp_path, "own.jsonl", [{"prompt": "Q3?", "reply": "c"}])
    rows, about = collected(
        tmp_path, {"preferences": ["pairs.jsonl"], "demonstrations": ["own.jsonl"]}
    )
    assert [row.reply for row in rows["demonstrations"]] == ["c"]
    assert about["demonstrations"]["derived_from"] == ""


@pytest.mark.parametrize("limit", [None, 100])
def test_a_source_says_which_kinds_are_derived_from_it(tmp_path: Path, limit: int | None) -> None:
    write(tmp_path, "helpful.jsonl", [pair("Q1?", "a")])
    write(tmp_path, "harmless.jsonl", [pair("Q2?", "b")])
    write(tmp_path, "judged.jsonl", [pair("Q3?", "c")])
    harmless = {"path": "harmless.jsonl", "derive": ["demonstrations"], "category": "harmless"}
    sources = ["helpful.jsonl", harmless, {"path": "judged.jsonl", "derive": []}]
    rows, about = collected(tmp_path, {"preferences": sources}, limit=limit)
    assert [row.reply for row in rows["demonstrations"]] == ["a", "b"]
    assert [row.category for row in rows["demonstrations"]] == ["general", "harmless"]
    assert [row.prompt[0].content for row in rows["prompts"]] == ["Q1?"]
    assert [row.text for row in rows["pretrain"]] == ["Q1?\na"]
    assert [file.get("derive") for file in about["preferences"]["files"]] == [
        None,
        ["demonstrations"],
        [],
    ]
    assert about["preferences"]["files"][1]["category"] == "harmless"


def test_a_category_of_the_source_is_that_of_every_row(tmp_path: Path) -> None:
    write(
        tmp_path,
        "pairs.jsonl",
        [pair("Q1?", "a"), pair("Q2?", "b") | {"category": "own", "source": "somebody"}],
    )
    rows, _ = collected(
        tmp_path, {"preferences": [{"path": "pairs.jsonl", "category": "harmless"}]}
    )
    assert [row.category for row in rows["preferences"]] == ["harmless", "harmless"]
    assert [row.source for row in rows["preferences"]] == ["pairs.jsonl", "somebody"]


@pytest.mark.slow
def test_a_file_s_own_row_does_not_depend_on_a_pair(tmp_path: Path) -> None:
    """A demonstration derived from a refused pair goes; one that a file has stays, with what comes
    of it.
    """
    pairs = [pair(f"Question {i}?", f"good {i}") for i in range(150)]
    write(tmp_path, "pairs.jsonl", [*pairs, pair("Bad?", "same", "same"), pair("Own?", "x", "x")])
    write(
        tmp_path, "own.jsonl", [{"prompt": "Own?", "reply": "x"}, {"prompt": "Else?", "reply": "y"}]
    )
    files = {"preferences": ["pairs.jsonl"], "demonstrations": ["own.jsonl"]}
    collected(tmp_path, files, also_derive=["demonstrations"])
    metrics, outputs = validate_raw(tmp_path)
    refused = [
        (row["kind"], row["position"]) for row in pq.read_table(outputs.quarantine).to_pylist()
    ]
    # Of "Bad?" the pair, its reply, its prompt and its text; of "Own?" the pair alone.
    assert sorted(refused) == [
        ("demonstrations", 151), ("preferences", 151), ("preferences", 152), ("pretrain", 151), ("prompts", 151),
    ]  # fmt: skip
    assert metrics["demonstrations"]["clean"] == 152


@pytest.mark.parametrize(
    ("files", "more", "message"),
    [
        (
            {"prompts": [{"path": "a", "derive": ["prompts"]}]},
            {},
            "derive of a names prompts, which is not derived",
        ),
        (
            {"demonstrations": [{"path": "a", "derive": ["demonstrations"]}]},
            {},
            "is not derived from demonstrations",
        ),
        (
            {"preferences": [{"path": "a", "derive": ["pretrain"]}]},
            {},
            "names pretrain alone, which is derived from",
        ),
        (
            {"preferences": [{"path": "a", "derive": ["preferences"]}]},
            {},
            "should be 'demonstrations', 'prompts'",
        ),
        (
            {"preferences": [{"path": "a", "category": "x", "columns": {"category": "c"}}]},
            {},
            "take category out of",
        ),
        (
            {},
            {"source": "world", "also_derive": ["prompts"]},
            "but collect.source is world; take it out",
        ),
    ],
)
def test_what_cannot_be_derived_is_refused(
    files: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        CollectConfig.model_validate({"source": "files", "files": files} | more)


REASON = "the reply is labelled false: nothing to imitate"


def labelled(count: int) -> list[dict[str, Any]]:
    """Rows whose labels are true and false by turns."""
    return [
        {"prompt": f"Labelled {i}?", "completion": f"reply {i}", "label": i % 2 == 0}
        for i in range(count)
    ]


def contents(raw: Path, kind: str) -> list[str]:
    return [
        row["prompt"][-1]["content"]
        for row in pq.read_table(raw / kind / "data.parquet").to_pylist()
    ]


@pytest.mark.slow
def test_a_false_label_is_no_bad_row_and_its_prompt_is_a_prompt(tmp_path: Path) -> None:
    pairs = [
        {"prompt": f"Pair {i}?", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(60)
    ]
    rows = labelled(60)
    rows[0]["completion"] = (
        "un caf\u00c3\u00a9"  # Refused for its text; labelled true, so its prompt goes with it.
    )
    rows[2] |= {
        "prompt": "Labelled 3?",
        "completion": "un th\u00c3\u00a9",
    }  # Refused; the prompt is also that of 3.
    files = write(tmp_path, "pairs.jsonl", pairs), write(tmp_path, "kto.jsonl", rows)
    sources = sources_by_kind(files, tmp_path, ReadOptions())
    checked = check_files(sources, tmp_path, ValidateConfig(min_rows=20), tmp_path / "out")
    (_, file) = checked.files
    assert (file.records, file.kept, file.refused, dict(file.dropped)) == (60, 28, 2, {REASON: 30})
    assert checked.kinds["demonstrations"] == {"raw": 30, "clean": 28}
    # Those of 60 pairs, 30 bad replies and 28 good ones that stay.
    assert checked.kinds["prompts"] == {"raw": 119, "clean": 118}
    assert "quarantined_share" not in as_text(checked), (
        "few rows are bad, so none of these conditions fails"
    )
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
    write(tmp_path, "kto.jsonl", labelled(10))
    write(tmp_path, "pairs.jsonl", [{"prompt": "Labelled 0?", "chosen": "a", "rejected": "b"}])
    files = {
        "preferences": ("pairs.jsonl",),
        "demonstrations": ({"path": "kto.jsonl", "cap": cap},),
    }
    collect_files(tmp_path, files, limit=limit)
    raw = tmp_path / "data/raw"
    assert contents(raw, "demonstrations") == [f"Labelled {i}?" for i in replies]
    assert contents(raw, "prompts") == [f"Labelled {i}?" for i in prompts]
    (file,) = read_json(raw / "manifest.json")["kinds"]["demonstrations"]["files"]
    assert file["dropped"] == {REASON: 5} and file["records"] == file["rows"] + file["cut"] + 5
    assert not list(raw.glob("*/prompts-*.parquet"))


def test_prompts_that_are_given_are_not_added_to(tmp_path: Path) -> None:
    write(tmp_path, "kto.jsonl", labelled(10))
    write(tmp_path, "pairs.jsonl", [{"prompt": "Q?", "chosen": "a", "rejected": "b"}])
    write(tmp_path, "prompts.jsonl", [{"prompt": "P?"}])
    files = {
        "preferences": ["pairs.jsonl"],
        "demonstrations": ["kto.jsonl"],
        "prompts": ["prompts.jsonl"],
    }
    collect_files(tmp_path, files)
    raw = tmp_path / "data/raw"
    assert contents(raw, "prompts") == ["P?"]
    assert not (raw / "prompt_only.parquet").exists()

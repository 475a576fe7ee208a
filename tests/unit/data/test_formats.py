"""Every known format by hand, refusals with reasons, and clear errors for what is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import DataSource
from rlhf_core.data.collection.rows import FileRows, prompt_group
from rlhf_core.data.collection.sources import read_sources, source_files
from rlhf_core.errors import DataError

USER = {"role": "user", "content": "Hi?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(tmp_path: Path, rows: Any, kind: str = "preferences", name: str = "x.json") -> FileRows:
    text = "\n".join(json.dumps(row) for row in rows) if name.endswith("l") else json.dumps(rows)
    (tmp_path / name).write_text(text)
    (result,) = read_sources([name], kind, tmp_path)
    return result


PAIR_FORMATS = {
    "conversational": {"prompt": [USER], "chosen": [said("yes")], "rejected": [said("no")]},
    "conversational-implicit": {"chosen": [USER, said("yes")], "rejected": [USER, said("no")]},
    "standard": {"prompt": "Hi?", "chosen": "yes", "rejected": "no"},
    "hh-rlhf": {"chosen": "\n\nHuman: Hi?\n\nAssistant: yes", "rejected": "\n\nHuman: Hi?\n\nAssistant: no"},
    "sharegpt-ranking": {
        "conversations": [{"from": "human", "value": "Hi?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "alpaca-ranking": {"instruction": "Hi?", "input": "", "chosen": "yes", "rejected": "no"},
}


@pytest.mark.parametrize("name", PAIR_FORMATS)
@pytest.mark.parametrize("file", ["x.json", "x.jsonl"])
def test_every_pair_format_gives_the_same_row(name: str, file: str, tmp_path: Path) -> None:
    result = read(tmp_path, [PAIR_FORMATS[name]], name=file)
    assert result.counts.format == name
    (row,) = result.rows
    assert (row["prompt"], row["chosen"], row["rejected"], row["margin"]) == ([USER], "yes", "no", None)
    assert (row["group"], row["source"], row["category"]) == ("hi?", file, "general")


@pytest.mark.parametrize("name", PAIR_FORMATS)
def test_preferred_replies_serve_as_demonstrations(name: str, tmp_path: Path) -> None:
    (row,) = read(tmp_path, [PAIR_FORMATS[name]], "demonstrations").rows
    assert (row["prompt"], row["reply"]) == ([USER], "yes")


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("alpaca", {"instruction": "Hi?", "input": "", "output": "yes"}),
        ("messages", {"messages": [USER, said("yes")]}),
        ("messages", {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "yes"}]}),
        ("turn-list", ["Hi?", "yes"]),
        ("prompt-reply", {"prompt": "Hi?", "reply": "yes"}),
        ("prompt-reply", {"prompt": [USER], "completion": [said("yes")]}),
    ],
)
def test_demonstration_formats(name: str, record: Any, tmp_path: Path) -> None:
    result = read(tmp_path, [record], "demonstrations")
    assert result.counts.format == name
    assert (result.rows[0]["prompt"], result.rows[0]["reply"]) == ([USER], "yes")
    assert read(tmp_path, [record], "prompts").rows[0]["prompt"] == [USER]
    assert read(tmp_path, [record], "pretrain").rows[0]["text"] == "Hi?\nyes"


def test_alpaca_joins_input_system_and_history(tmp_path: Path) -> None:
    record = {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be brief", "history": [["Hi?", "yes"]]}
    (row,) = read(tmp_path, [record], "demonstrations").rows
    system = {"role": "system", "content": "Be brief"}
    assert row["prompt"] == [system, USER, said("yes"), {"role": "user", "content": "Add\n\n1 2"}]


def test_text_and_plain_prompts(tmp_path: Path) -> None:
    assert read(tmp_path, [{"text": "Once."}], "pretrain").rows[0]["text"] == "Once."
    assert read(tmp_path, [{"prompt": "Hi?"}], "prompts").rows[0]["prompt"] == [USER]
    assert read(tmp_path, [["Hi?", "yes", "Hm?"]], "prompts").rows[0]["prompt"][-1]["content"] == "Hm?"


def test_a_file_that_several_patterns_match_is_read_once(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(PAIR_FORMATS["standard"]))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    named = DataSource(path="./b.jsonl", format="standard")
    urls = [f"file://{tmp_path}/link.jsonl", f"local://{tmp_path}/?.jsonl"]
    specs = ["*.jsonl", "a.jsonl", str(tmp_path / "b.jsonl"), named, "?.jsonl", *urls]
    files = source_files(specs, tmp_path)
    assert [(file.name, file.options.format) for file in files] == [("a.jsonl", None), ("b.jsonl", "standard")]
    assert [result.counts.source for result in read_sources(specs, "preferences", tmp_path)] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match=r"b\.jsonl is named with the formats standard and prompt"):
        source_files([named, DataSource(path="b.jsonl", format="prompt")], tmp_path)


def test_group_ignores_case_spaces_and_system() -> None:
    first = prompt_group([{"role": "system", "content": "x"}, {"role": "user", "content": " What  is\nIT? "}])
    assert first == prompt_group([{"role": "user", "content": "what is it?"}]) == "what is it?"

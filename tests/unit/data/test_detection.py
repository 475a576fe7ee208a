"""The format of a file is that of nearly all of its rows, or the one that params.yaml names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from rlhf_core.config.data import DataSource, FileSources, FormatName
from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.readers.detection import FORMATS
from rlhf_core.errors import DataError

PAIR = {"prompt": "Q?", "chosen": "a", "rejected": "b"}
PROMPT = {"prompt": "Q?"}
REPLY = {"prompt": "Q?", "reply": "a"}


def read(tmp_path: Path, rows: list[Any], kind: str = "preferences", format_name: FormatName | None = None) -> FileRows:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (result,) = read_sources([DataSource(path="x.jsonl", format=format_name)], kind, tmp_path)
    return result


def test_the_first_thousand_rows_decide(tmp_path: Path) -> None:
    result = read(tmp_path, [PAIR] * 1000 + [PROMPT] * 1500)
    assert (result.counts.format, len(result.rows), len(result.refused)) == ("standard", 1000, 1500)
    with pytest.raises(DataError, match=r"\(800 standard, 200 prompt\)"):
        read(tmp_path, [PAIR] * 800 + [PROMPT] * 200 + [PAIR] * 9000)


def test_a_named_format_holds_whatever_the_rows_look_like(tmp_path: Path) -> None:
    mixed = [PROMPT] * 3 + [PAIR] * 7
    result = read(tmp_path, mixed, format_name="standard")
    assert (result.counts.format, len(result.rows), len(result.refused)) == ("standard", 7, 3)
    assert len(read(tmp_path, mixed, "prompts", "prompt").rows) == 10
    with pytest.raises(DataError, match="format prompt, which holds no preferences"):
        read(tmp_path, mixed, format_name="prompt")


def test_a_row_with_more_than_the_format_is_not_cut_to_it(tmp_path: Path) -> None:
    result = read(tmp_path, [PROMPT] * 30 + [REPLY], "prompts")
    assert "is of format prompt-reply, the file of format prompt" in result.refused[0].reason


def test_rows_of_no_known_format_are_refused_in_a_few_lines_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--column prompt=question .* columns: \{prompt: question, …\}") as refused:
        read(tmp_path, [{"title": "Q?"}])
    assert len(str(refused.value).splitlines()) == 1 and "keys title" in str(refused.value)
    assert all(shape.name in str(refused.value) for shape in FORMATS)


def test_params_can_name_every_format() -> None:
    assert set(get_args(FormatName)) == {shape.name for shape in FORMATS}
    files = FileSources.model_validate({"preferences": ["a.jsonl", {"path": "b.jsonl", "format": "standard"}]})
    assert files.of("preferences") == (DataSource(path="a.jsonl"), DataSource(path="b.jsonl", format="standard"))
    assert files.paths() == ["a.jsonl", "b.jsonl"]
    with pytest.raises(ValueError, match="hh-rlhf"):
        FileSources.model_validate({"preferences": [{"path": "b.jsonl", "format": "unknown"}]})


def test_a_prompt_that_asks_for_a_dialogue_is_no_transcript(tmp_path: Path) -> None:
    dialogue = "Human: hi\n\nAssistant: hello"
    rows = [{"prompt": f"Write a dialogue {n}", "chosen": dialogue, "rejected": "no"} for n in range(3)]
    result = read(tmp_path, [*rows, PAIR])
    assert result.counts.format == "standard" and len(result.rows) == 1
    assert all("transcript" in refused.reason for refused in result.refused)
    transcripts = [{"prompt": "hi", "chosen": dialogue, "rejected": "Human: hi\n\nAssistant: go"}]
    assert read(tmp_path, transcripts).counts.format == "hh-rlhf"

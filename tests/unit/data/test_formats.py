"""Every known format by hand, how that of a file is found, and a user's own names of columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from unit.data.reading import PAIR_FORMATS, said, user

from rlhf_core.config.data import DataSource, FileSources
from rlhf_core.config.formats import FormatName
from rlhf_core.data.collection.rows import FileRows, prompt_group
from rlhf_core.data.collection.sources import read_sources, source_files
from rlhf_core.data.readers.detection import FORMATS
from rlhf_core.errors import DataError

USER = user("Hi?")


def read(tmp_path: Path, rows: list[Any], kind: str = "preferences", **options: Any) -> FileRows:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (result,) = read_sources([DataSource(path="x.jsonl", **options)], kind, tmp_path)
    return result


@pytest.mark.parametrize("name", PAIR_FORMATS)
def test_every_pair_format_gives_the_same_row(name: str, tmp_path: Path) -> None:
    record, options = (
        PAIR_FORMATS[name]("Hi?", "yes", "no"),
        {"dimension": "safe"} if name == "pku-saferlhf" else {},
    )
    result = read(tmp_path, [record], **options)
    assert result.counts.format == name
    (row,) = result.rows
    assert (row["prompt"], row["chosen"], row["rejected"]) == ([USER], "yes", "no")
    assert (row["group"], row["source"], row["category"]) == (
        "hi?",
        "x.jsonl",
        options.get("dimension", "general"),
    )
    (row,) = read(tmp_path, [record], "demonstrations", **options).rows
    assert (row["prompt"], row["reply"]) == ([USER], "yes"), (
        "preferred replies serve as demonstrations"
    )


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("alpaca", {"instruction": "Hi?", "input": "", "output": "yes"}),
        ("messages", {"messages": [USER, said("yes")]}),
        (
            "messages",
            {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "yes"}]},
        ),
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
    record = {
        "instruction": "Add",
        "input": "1 2",
        "output": "3",
        "system": "Be brief",
        "history": [["Hi?", "yes"]],
    }
    (row,) = read(tmp_path, [record], "demonstrations").rows
    system = {"role": "system", "content": "Be brief"}
    assert row["prompt"] == [system, USER, said("yes"), {"role": "user", "content": "Add\n\n1 2"}]


def test_text_and_plain_prompts(tmp_path: Path) -> None:
    assert read(tmp_path, [{"text": "Once."}], "pretrain").rows[0]["text"] == "Once."
    assert read(tmp_path, [{"prompt": "Hi?"}], "prompts").rows[0]["prompt"] == [USER]
    assert (
        read(tmp_path, [["Hi?", "yes", "Hm?"]], "prompts").rows[0]["prompt"][-1]["content"] == "Hm?"
    )


def test_a_file_that_several_patterns_match_is_read_once(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(PAIR_FORMATS["standard"]("Hi?", "yes", "no")))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    named = DataSource(path="./b.jsonl", format="standard")
    urls = [f"file://{tmp_path}/link.jsonl", f"local://{tmp_path}/?.jsonl"]
    specs = ["*.jsonl", "a.jsonl", str(tmp_path / "b.jsonl"), named, "?.jsonl", *urls]
    files = source_files(specs, tmp_path)
    assert [(file.name, file.options.format) for file in files] == [
        ("a.jsonl", None),
        ("b.jsonl", "standard"),
    ]
    assert [result.counts.source for result in read_sources(specs, "preferences", tmp_path)] == [
        "a.jsonl",
        "b.jsonl",
    ]
    with pytest.raises(DataError, match=r"b\.jsonl is named with the formats standard and prompt"):
        source_files([named, DataSource(path="b.jsonl", format="prompt")], tmp_path)


def test_group_ignores_case_spaces_and_system() -> None:
    first = prompt_group(
        [{"role": "system", "content": "x"}, {"role": "user", "content": " What  is\nIT? "}]
    )
    assert first == prompt_group([{"role": "user", "content": "what is it?"}]) == "what is it?"


PAIR = {"prompt": "Q?", "chosen": "a", "rejected": "b"}
PROMPT = {"prompt": "Q?"}


def test_the_first_thousand_rows_decide(tmp_path: Path) -> None:
    result = read(tmp_path, [PAIR] * 1000 + [PROMPT] * 1500)
    assert (result.counts.format, len(result.rows), len(result.refused)) == ("standard", 1000, 1500)
    with pytest.raises(DataError, match=r"\(800 standard, 200 prompt\)"):
        read(tmp_path, [PAIR] * 800 + [PROMPT] * 200 + [PAIR] * 9000)


def test_a_named_format_holds_whatever_the_rows_look_like(tmp_path: Path) -> None:
    mixed = [PROMPT] * 3 + [PAIR] * 7
    result = read(tmp_path, mixed, format="standard")
    assert (result.counts.format, len(result.rows), len(result.refused)) == ("standard", 7, 3)
    assert len(read(tmp_path, mixed, "prompts", format="prompt").rows) == 10
    with pytest.raises(DataError, match="format prompt, which holds no preferences"):
        read(tmp_path, mixed, format="prompt")


def test_rows_of_no_known_format_are_refused_in_a_few_lines_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"--column prompt=question .* columns: \{prompt: question, …\}"
    ) as refused:
        read(tmp_path, [{"title": "Q?"}])
    assert len(str(refused.value).splitlines()) == 1 and "keys title" in str(refused.value)
    assert all(shape.name in str(refused.value) for shape in FORMATS)


def test_params_can_name_every_format() -> None:
    assert set(get_args(FormatName)) == {shape.name for shape in FORMATS}
    files = FileSources.model_validate(
        {"preferences": ["a.jsonl", {"path": "b.jsonl", "format": "standard"}]}
    )
    assert files.of("preferences") == (
        DataSource(path="a.jsonl"),
        DataSource(path="b.jsonl", format="standard"),
    )
    assert files.paths() == ["a.jsonl", "b.jsonl"]
    with pytest.raises(ValueError, match="hh-rlhf"):
        FileSources.model_validate({"preferences": [{"path": "b.jsonl", "format": "unknown"}]})


def test_a_prompt_that_asks_for_a_dialogue_is_no_transcript(tmp_path: Path) -> None:
    dialogue = "Human: hi\n\nAssistant: hello"
    rows = [
        {"prompt": f"Write a dialogue {n}", "chosen": dialogue, "rejected": "no"} for n in range(3)
    ]
    result = read(tmp_path, [*rows, PAIR])
    assert result.counts.format == "standard" and len(result.rows) == 1
    assert all("transcript" in refused.reason for refused in result.refused)
    transcripts = [{"prompt": "hi", "chosen": dialogue, "rejected": "Human: hi\n\nAssistant: go"}]
    assert read(tmp_path, transcripts).counts.format == "hh-rlhf"


NAMED = {"prompt": "question", "chosen": "good", "rejected": "bad"}
ROW = {"question": " Why?\n", "good": "a ", "bad": "\tb", "messages": ["not", "these"], "margin": 4}


def test_named_columns_are_read_and_no_others(tmp_path: Path) -> None:
    result = read(tmp_path, [ROW], columns=NAMED)
    (row,) = result.rows
    assert result.counts.format == "standard"
    assert (row["prompt"][0]["content"], row["chosen"], row["rejected"]) == (" Why?\n", "a ", "\tb")
    assert row["margin"] is None, "a column that is not named is not read"
    (row,) = read(tmp_path, [ROW], columns=NAMED | {"margin": "margin"}).rows
    assert row["margin"] == 4


def test_a_template_writes_the_prompt(tmp_path: Path) -> None:
    rows = [{"title": "T {x}", "body.text": "B", "more": {"hint": "H"}, "good": "a", "bad": "b"}]
    template = "# {title}\n\n{body.text} {{{more.hint}}}"
    columns = {"chosen": "good", "rejected": "bad"}
    (row,) = read(tmp_path, rows, columns=columns, template=template).rows
    assert row["prompt"] == [{"role": "user", "content": "# T {x}\n\nB {H}"}]
    (row,) = read(
        tmp_path, [*rows, rows[0] | {"title": 5}], columns=columns, template=template
    ).refused
    assert (
        row.reason == "the column title is not text but int" and json.loads(row.row)["title"] == 5
    )


def test_rankings_and_messages_can_be_named_too(tmp_path: Path) -> None:
    ranking = {"q": "Why?", "answers": ["b", "a"], "stars": [1, 5]}
    columns = {"prompt": "q", "responses": "answers", "scores": "stars"}
    assert read(tmp_path, [ranking], columns=columns).rows[0]["margin"] == 4
    talk = {"talk": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "a"}]}
    assert (
        read(tmp_path, [talk], "demonstrations", columns={"messages": "talk"}).rows[0]["reply"]
        == "a"
    )


def test_a_column_that_no_row_has_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"x\.jsonl: no row has a column 'goood'; the columns are bad, good, margin"
    ):
        read(tmp_path, [ROW], columns=NAMED | {"chosen": "goood"})


def test_a_row_that_lacks_a_column_is_refused_as_it_was(tmp_path: Path) -> None:
    short = {"question": "Why?", "good": "a"}
    result = read(tmp_path, [ROW, short, 7, ROW], columns=NAMED)
    assert [(row.position, row.reason) for row in result.refused] == [
        (2, "there is no column 'bad'"),
        (3, "there is no column 'question'"),
    ]
    assert json.loads(result.refused[0].row) == short and result.positions == [1, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"promt": "question"}}, "promt"),
        ({"columns": {"prompt": 5}}, "valid string"),
        ({"template": "{title"}, "expected '}'"),
        ({"template": "{}"}, "braces hold the name of a column"),
        ({"template": "{title!r}"}, "braces hold the name of a column"),
        ({"template": "no column"}, "the template names no column"),
        ({"template": "{title}", "columns": {"prompt": "title"}}, "template writes the prompt"),
        ({"dimension": "funny"}, "'helpful', 'safe' or 'agreed'"),
    ],
)
def test_wrong_options_are_refused_when_params_are_read(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FileSources.model_validate({"preferences": [{"path": "x.jsonl", **options}]})

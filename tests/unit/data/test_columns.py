"""A user's own column names and prompt template: what they name is read, and what is not there is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import DataSource, FileSources
from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.errors import DataError

PAIR = {"prompt": "question", "chosen": "good", "rejected": "bad"}
ROW = {"question": " Why?\n", "good": "a ", "bad": "\tb", "messages": ["not", "these"], "margin": 4}


def read(tmp_path: Path, rows: list[Any], kind: str = "preferences", **options: Any) -> FileRows:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (result,) = read_sources([DataSource(path="x.jsonl", **options)], kind, tmp_path)
    return result


def test_named_columns_are_read_and_no_others(tmp_path: Path) -> None:
    result = read(tmp_path, [ROW], columns=PAIR)
    (row,) = result.rows
    assert result.counts.format == "standard"
    assert (row["prompt"][0]["content"], row["chosen"], row["rejected"]) == (" Why?\n", "a ", "\tb")
    assert row["margin"] is None, "a column that is not named is not read"
    (row,) = read(tmp_path, [ROW], columns=PAIR | {"margin": "margin"}).rows
    assert row["margin"] == 4


def test_a_template_writes_the_prompt(tmp_path: Path) -> None:
    rows = [{"title": "T {x}", "body.text": "B", "more": {"hint": "H"}, "good": "a", "bad": "b"}]
    template = "# {title}\n\n{body.text} {{{more.hint}}}"
    columns = {"chosen": "good", "rejected": "bad"}
    (row,) = read(tmp_path, rows, columns=columns, template=template).rows
    assert row["prompt"] == [{"role": "user", "content": "# T {x}\n\nB {H}"}]
    (row,) = read(tmp_path, [*rows, rows[0] | {"title": 5}], columns=columns, template=template).refused
    assert row.reason == "the column title is not text but int" and json.loads(row.row)["title"] == 5


def test_rankings_and_messages_can_be_named_too(tmp_path: Path) -> None:
    ranking = {"q": "Why?", "answers": ["b", "a"], "stars": [1, 5]}
    columns = {"prompt": "q", "responses": "answers", "scores": "stars"}
    assert read(tmp_path, [ranking], columns=columns).rows[0]["margin"] == 4
    talk = {"talk": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "a"}]}
    assert read(tmp_path, [talk], "demonstrations", columns={"messages": "talk"}).rows[0]["reply"] == "a"


def test_a_column_that_no_row_has_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl: no row has a column 'goood'; the columns are bad, good, margin"):
        read(tmp_path, [ROW], columns=PAIR | {"chosen": "goood"})


def test_a_row_that_lacks_a_column_is_refused_as_it_was(tmp_path: Path) -> None:
    short = {"question": "Why?", "good": "a"}
    result = read(tmp_path, [ROW, short, 7, ROW], columns=PAIR)
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
def test_wrong_options_are_refused_when_params_are_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FileSources.model_validate({"preferences": [{"path": "x.jsonl", **options}]})

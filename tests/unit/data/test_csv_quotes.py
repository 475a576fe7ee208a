"""Quoted CSV text is read back as it was written, and a JSON list gives the same value by value."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from unit.data.reading import records_of

from rlhf_core.data.readers import json_records as json_list
from rlhf_core.data.readers.json_records import ExtraData, JsonText
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.errors import DataError

HEADER = ["prompt", "chosen", "rejected"]
TABLE = "Here:\nname,age,city\nBob,3,Rome"
PLAIN = ["who?", "Bob", "Ann"]
COMMAS = ["who, really?", "Bob, I think", "Ann, no doubt"]


def written(
    rows: list[list[str]], line_end: str = "\r\n", quoting: int = csv.QUOTE_MINIMAL
) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=line_end, quoting=quoting).writerows(rows)
    return text.getvalue().encode()


def read(content: bytes) -> list[list[str]]:
    records = records_of("x.csv", content)
    assert not any(record.problem for record in records)
    return [list(record.value.values()) for record in records]


@pytest.mark.parametrize(
    "row",
    [
        ["a,b,c\n1,2,3\n4,5,6\nWhat is the sum?", "21", "dunno"],
        ["Make a CSV", TABLE, TABLE],
        ["Make a CSV", "Header,\nBob,3,Rome\nx,y,z", "no"],
        ["write a reader", "", "import csv\nfor a,b in x:\n    print(a,b,end='')\n"],
        ["two lines", "no", "Here:\n1,2,3"],
    ],
)
def test_a_table_in_a_text_is_read_where_lines_end_otherwise_than_rows(row: list[str]) -> None:
    assert read(written([HEADER, row, PLAIN, PLAIN])) == [row, PLAIN, PLAIN]


@pytest.mark.parametrize("doubtful", [0, 3])
def test_a_table_in_a_text_is_read_where_most_rows_are_quoted(doubtful: int) -> None:
    rows = [COMMAS, COMMAS, PLAIN]
    rows.insert(doubtful, ["Make a CSV", "no", TABLE])
    assert read(written([HEADER, *rows], "\n")) == rows


def test_tables_in_most_texts_are_read() -> None:
    rows = [*[["Make a CSV", f"{n}", TABLE] for n in range(4)], PLAIN, PLAIN]
    assert read(written([HEADER, *rows], "\n")) == rows


@pytest.mark.parametrize("doubtful", [0, 2])
def test_a_table_in_a_text_of_an_otherwise_plain_file_is_refused_with_the_remedy(
    doubtful: int,
) -> None:
    rows = [PLAIN, PLAIN]
    rows.insert(doubtful, ["Make a CSV", "no", TABLE])
    with pytest.raises(
        DataError,
        match=rf"x\.csv, line {2 + doubtful}: .* runs to line .* save the file as \.jsonl",
    ):
        records_of("x.csv", written([HEADER, *rows], "\n"))


@pytest.mark.parametrize(
    "rows",
    [
        'q1,a1,"b1\nq2,a2,b2"\nq3,a3,b3\n',
        'q1,a1,"b1\nq2,a2,b2"',
        'q1,"a1,b1\nq2,a2",b2\nq3,a3,b3\n',
        '"q1,a1,b1\nq2",a2,b2\nq3,a3,b3\n',
        'q0,a0,b0\r\nq1,a1,"b1\r\nq2,a2,b2"\r\n',
        'q1,"a1, b1\nq2, a2, b2\nq3, a3", b3\nq4,a,b\n',
        'q1,a1,"b1\nq2,a2,b2"\nq3,a3,b3\nq4,"a, 4",b4\nq5,a5,b5\n',
    ],
)
def test_rows_between_two_stray_quotes_are_refused(rows: str) -> None:
    with pytest.raises(DataError, match="two stray quotes may have swallowed rows"):
        records_of("x.csv", f"prompt,chosen,rejected\n{rows}".encode())


def test_a_carriage_return_without_quotes_does_not_cut_a_text() -> None:
    # As csv.writer of Python 3.11 writes ["who?", "first\rsecond"] where rows end with \n.
    with pytest.raises(
        DataError, match=r"x\.csv, line 3: a carriage return .*save the file as \.jsonl"
    ):
        records_of("x.csv", b"prompt,reply\nwho?,Bob\nwho?,first\rsecond\n")
    assert len(records_of("x.csv", b"prompt,reply\rwho?,Bob\rwho?,Ann\r")) == 2


TEXTS = st.lists(
    st.sampled_from(["a", ",", ",", "\n", "\n", "\r\n", "\r", '"', " "]), max_size=7
).map("".join)


@settings(max_examples=60)
@given(
    columns=st.integers(1, 4),
    line_end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    data=st.data(),
)
def test_texts_are_read_back_or_refused(
    columns: int, line_end: str, quoting: int, data: st.DataObject
) -> None:
    rows = data.draw(
        st.lists(st.lists(TEXTS, min_size=columns, max_size=columns), min_size=1, max_size=6)
    )
    # A carriage return that Python 3.11 leaves unquoted at a row's end is the half of a line break.
    assume(
        quoting == csv.QUOTE_ALL
        or line_end == "\r\n"
        or not any(row[-1].endswith("\r") for row in rows)
    )
    require_read_or_refused([[f"c{n}" for n in range(columns)], *rows], line_end, quoting)


PIECES = st.sampled_from(["a", "b,c", "1,2,3", "4,5,6", "d,e", "f"])
TABLES = st.lists(PIECES, min_size=1, max_size=4).map("\n".join)


@settings(max_examples=60)
@given(
    rows=st.lists(st.lists(TABLES, min_size=3, max_size=3), min_size=1, max_size=5),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
@example([["a", "b", "f\n1,2,3"], ["a", "b", "c"]], "\n")
def test_tables_are_read_back_or_refused_with_the_remedy(
    rows: list[list[str]], line_end: str
) -> None:
    was_read = require_read_or_refused([HEADER, *rows], line_end, csv.QUOTE_MINIMAL)
    assert was_read or line_end == "\n"


def require_read_or_refused(rows: list[list[str]], line_end: str, quoting: int) -> bool:
    """Check that rows are read back as they are, or refused with the remedy, and return which."""
    content = written(rows, line_end, quoting)
    try:
        records = records_of("x.csv", content)
    except DataError as error:
        assert ".jsonl" in str(error) and str(error).startswith("x.csv, line ")
        return False
    assert [list(record.value.values()) for record in records] == rows[1:]
    return True


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
SMALL_CHUNKS = settings(
    max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def values_of(content: bytes) -> list[Any]:
    return [record.value for record in JsonText("x.json", io.BytesIO(content)).records()]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_list, "CHUNK", 7)


@pytest.mark.usefixtures("small_chunks")
@SMALL_CHUNKS
@given(
    st.lists(VALUES, max_size=6),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)
def test_the_values_are_those_of_the_whole(
    listed: list[Any], indent: int | None, ascii_only: bool, code: str
) -> None:
    text = json.dumps(listed, indent=indent, ensure_ascii=ascii_only)
    assert values_of(text.encode(code, "surrogatepass")) == listed


@pytest.mark.usefixtures("small_chunks")
@SMALL_CHUNKS
@given(st.lists(VALUES, min_size=1, max_size=4), st.data())
def test_what_is_cut_off_or_spoilt_is_refused_as_json_refuses_it(
    listed: list[Any], data: Any
) -> None:
    text = json.dumps(listed, indent=1)
    at = data.draw(st.integers(1, len(text) - 1))
    spoilt = data.draw(
        st.sampled_from([text[:at], text[:at] + "?" + text[at:], text[:at] + "\n" + text[at:]])
    )
    try:
        expected = json.loads(spoilt)
    except json.JSONDecodeError as error:
        with pytest.raises((DataError, ExtraData)) as refused:
            values_of(spoilt.encode())
        # Where a value is missing, versions of Python name its place or that of the comma before
        # it.
        place = f"line {error.lineno} column {error.colno} (char {error.pos})"
        assert str(refused.value).endswith(place) or "trailing comma" in error.msg
    else:
        assert values_of(spoilt.encode()) == expected


@pytest.mark.usefixtures("small_chunks")
def test_lists_in_lines_are_told_while_rows_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    path.write_text('["a", "b"]\n["c"]')
    assert [record.value for record in stream_records(path)] == [["a", "b"], ["c"]]
    monkeypatch.setattr("rlhf_core.data.readers.json_records.HELD_CHARACTERS", 3)
    with pytest.raises(
        DataError, match=r"is not valid JSON: Extra data: line 2 column 1 \(char 11\)"
    ):
        list(stream_records(path))


@pytest.mark.usefixtures("small_chunks")
def test_a_value_that_does_not_end_is_not_searched_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_list, "MAX_VALUE", 50)
    path = tmp_path / "x.json"
    path.write_text('[{"a": 1}, {"a": "' + "b" * 400 + '"}]')
    with pytest.raises(
        DataError, match=r"a JSON value of more than .* \(line 1 column 12 \(char 11\)\)"
    ):
        list(stream_records(path))

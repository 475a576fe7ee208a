"""A JSON list that is read value by value gives what it gives as a whole, positions and refusals included."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_core.data.readers import json_records as json_list
from rlhf_core.data.readers.json_records import ExtraData, JsonText
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
SMALL_CHUNKS = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


def values_of(content: bytes) -> list[Any]:
    return [record.value for record in JsonText("x.json", io.BytesIO(content)).records()]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_list, "CHUNK", 7)


@SMALL_CHUNKS
@given(
    st.lists(VALUES, max_size=6),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)
def test_the_values_are_those_of_the_whole(listed: list[Any], indent: int | None, ascii_only: bool, code: str) -> None:
    text = json.dumps(listed, indent=indent, ensure_ascii=ascii_only)
    assert values_of(text.encode(code, "surrogatepass")) == listed


@SMALL_CHUNKS
@given(st.lists(VALUES, min_size=1, max_size=4), st.data())
def test_what_is_cut_off_or_spoilt_is_refused_as_json_refuses_it(listed: list[Any], data: Any) -> None:
    text = json.dumps(listed, indent=1)
    at = data.draw(st.integers(1, len(text) - 1))
    spoilt = data.draw(st.sampled_from([text[:at], text[:at] + "?" + text[at:], text[:at] + "\n" + text[at:]]))
    try:
        expected = json.loads(spoilt)
    except json.JSONDecodeError as error:
        with pytest.raises((DataError, ExtraData)) as refused:
            values_of(spoilt.encode())
        # Where a value is missing, versions of Python name its place or that of the comma before it.
        assert str(refused.value).endswith(f"(char {error.pos})") or "trailing comma" in error.msg
    else:
        assert values_of(spoilt.encode()) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1},\n {"a": nul}]', "Expecting value: line 2 column 8 (char 18)"),
        ('[{"a": 1},\n\n  {"a": "x\ty"}]', "Invalid control character at: line 3 column 11 (char 22)"),
        ('[{"a": 1} {"a": 2}]', "Expecting ',' delimiter: line 1 column 11 (char 10)"),
        ('[{"a": 1}, {"a": "b}]', "Unterminated string starting at: line 1 column 18 (char 17)"),
        ('[{"a": 1}', "Expecting ',' delimiter: line 1 column 10 (char 9)"),
    ],
)
def test_messages_name_the_place_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DataError) as refused:
        list(stream_records(path))
    assert str(refused.value) == f"{path} is not valid JSON: {message}"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('["a"]\n["b"]', [["a"], ["b"]]),
        ('{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ('{"data": [{"a": 1}]}', [{"a": 1}]),
    ],
)
def test_json_lines_and_data_are_read_too(tmp_path: Path, text: str, rows: list[Any]) -> None:
    (tmp_path / "x.json").write_text(text)
    assert [record.value for record in stream_records(tmp_path / "x.json")] == rows


def test_lists_in_lines_are_told_from_a_list_while_its_rows_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    path.write_text('["a", "b"]\n["c"]')
    assert [record.value for record in stream_records(path)] == [["a", "b"], ["c"]]
    monkeypatch.setattr("rlhf_core.data.readers.json_records.HELD_CHARACTERS", 3)
    with pytest.raises(DataError, match=r"is not valid JSON: Extra data: line 2 column 1 \(char 11\)"):
        list(stream_records(path))


def test_a_value_that_does_not_end_is_not_searched_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_list, "MAX_VALUE", 50)
    path = tmp_path / "x.json"
    path.write_text('[{"a": 1}, {"a": "' + "b" * 400 + '"}]')
    with pytest.raises(DataError, match=r"a JSON value of more than .* \(line 1 column 12 \(char 11\)\)"):
        list(stream_records(path))

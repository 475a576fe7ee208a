"""Containers lose nothing: what cannot be read as it was written is refused, with the file and the line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.reading import records_of

from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.errors import DataError

HEADER = "prompt,chosen,rejected\n"


def read(tmp_path: Path, name: str, content: bytes | str) -> FileRows:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (result,) = read_sources([name], "preferences", tmp_path)
    return result


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('a,b,c\nd,"e,f\ng,h,i\nj,k,l\n', 3),  # open to the end of the file: two rows would vanish inside e
        ('a,b,c\n"d,e,f\n"g",h,i\n', 3),  # closed by the next field's opening quote
        ('"say ""hi""",b,c\n"say "hi"",b,c\n', 3),
        ('"a\nb",c,d\n"e,f,g\n', 4),
    ],
)
def test_a_csv_with_an_unclosed_quote_is_refused_with_its_line(rows: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"x\.csv, line {line}: .*quote"):
        read(tmp_path, "x.csv", HEADER + rows)


def test_quoted_line_breaks_commas_and_quotes_stay_in_the_text(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "x.csv", HEADER + '"a\r\nb","c, ""d""",e "f" g\n').rows
    assert (row["prompt"][0]["content"], row["chosen"], row["rejected"]) == ("a\r\nb", 'c, "d"', 'e "f" g')


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    columns = [pa.array([text]) for text in "abcd"]
    pq.write_table(pa.table(columns, names=["prompt", "chosen", "rejected", "chosen"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: the header names 'chosen' twice"):
        list(read_sources(["x.parquet"], "preferences", tmp_path))


GOOD = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
TWICE = '{"prompt": "a", "chosen": "b", "rejected": "c", "chosen": "d"}'
NESTED = '{"prompt": [{"role": "user", "content": "a", "content": "b"}], "chosen": "b", "rejected": "c"}'


@pytest.mark.parametrize(("row", "key"), [(TWICE, "chosen"), (NESTED, "content")])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_a_row_with_a_repeated_json_key_is_refused_and_keeps_both_values(
    name: str, row: str, key: str, tmp_path: Path
) -> None:
    result = read(tmp_path, name, f"{GOOD}\n{row}\n" if name == "x.jsonl" else f"[{GOOD}, {row}]")
    assert len(result.rows) == 1
    (refused,) = result.refused
    assert refused.position == 2 and refused.reason == f"the key '{key}' occurs twice"
    kept = json.loads(refused.row)
    assert '"b"' in json.dumps(kept) and ('"d"' if key == "chosen" else '"a"') in json.dumps(kept)


BIG = "9" * 5000


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {"9" * 400}}}',
            "the margin is not a finite number",
        ),
        (f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {BIG}}}', "an integer of 5000 digits"),
        (f'{{"prompt": "a", "chosen": "b", "rejected": "c", "extra": [{{"n": -{BIG}}}]}}', "an integer of 5001 digits"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": [1]}', "margin .* is not a number"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {"a": 1}}', "margin .* is not a number"),
    ],
    ids=lambda value: value[-30:],
)
@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_numbers_out_of_range_refuse_their_row(name: str, row: str, reason: str, tmp_path: Path) -> None:
    result = read(tmp_path, name, f"{GOOD}\n{row}\n" if name == "x.jsonl" else f"[{GOOD}, {row}]")
    assert len(result.rows) == 1
    (refused,) = result.refused
    assert refused.position == 2 and re.match(reason, refused.reason), refused.reason
    assert len(refused.reason) < 200
    if "digits" in reason:
        assert BIG in refused.row


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
@pytest.mark.parametrize("history", [5, "no", {"a": "b"}, [5], [["a"]], [[None, "b"]], [["a", "b", "c"]]], ids=repr)
def test_a_history_of_another_shape_refuses_its_row(name: str, history: object, tmp_path: Path) -> None:
    good = {"instruction": "a", "input": "", "chosen": "b", "rejected": "c"}
    rows = [json.dumps(row) for row in (good, good | {"history": history})]
    result = read(tmp_path, name, "\n".join(rows) if name == "x.jsonl" else f"[{', '.join(rows)}]")
    assert (len(result.rows), len(result.refused)) == (1, 1) and "history" in result.refused[0].reason


def parquet(tmp_path: Path, columns: dict[str, pa.Array]) -> FileRows:
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    (result,) = read_sources(["x.parquet"], "preferences", tmp_path)
    return result


def invalid_utf8(texts: list[bytes]) -> pa.Array:
    lengths = pa.array(texts, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(texts), lengths.buffers())


def test_bad_utf8_in_parquet_refuses_its_row(tmp_path: Path) -> None:
    texts = pa.array(["a", "b", "c"])
    columns = {"prompt": texts, "chosen": texts, "rejected": invalid_utf8([b"x", b"\xff\xfe", b"z"])}
    result = parquet(tmp_path, columns)
    assert len(result.rows) == 2
    (refused,) = result.refused
    assert refused.position == 2 and refused.reason.startswith("the column rejected cannot be read")
    assert json.loads(refused.row)["chosen"] == "b"


def test_a_timestamp_out_of_range_in_parquet_refuses_its_row(tmp_path: Path) -> None:
    texts = pa.array(["a", "b", "c"])
    when = pa.array([0, 2**62, 1], pa.timestamp("ms"))
    result = parquet(tmp_path, {"prompt": texts, "chosen": texts, "rejected": pa.array(["x", "y", "z"]), "when": when})
    assert len(result.rows) == 2
    (refused,) = result.refused
    assert refused.position == 2 and refused.reason.startswith("the column when cannot be read (")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("~nobody_of_this_name/x.jsonl", "~nobody_of_this_name"),
        ("x" * 5000, "File name too long"),
        ("a/" * 2500 + "*.jsonl", "File name too long"),
        ("x\0y.jsonl", "no file matches"),
        ("", "is empty"),
    ],
    ids=lambda text: text[:20],
)
def test_paths_that_cannot_be_are_users_errors(spec: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        list(read_sources([spec], "preferences", tmp_path))
    assert len(str(caught.value)) < 1000


def test_a_csv_field_over_the_limit_is_said_to_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.data.readers.csv_records.CSV_FIELD_LIMIT", 2**20)
    with pytest.raises(DataError, match=r"x\.csv, line 3: .*a field of more than 1 MiB begins there"):
        read(tmp_path, "x.csv", f"{HEADER}a,b,c\nd,{'x' * (2**20 + 1)},e\n")


def test_a_csv_field_of_any_length_and_a_file_that_ends_early(tmp_path: Path) -> None:
    long = "x" * 200_000
    assert read(tmp_path, "x.csv", f"{HEADER}a,{long},c\n").rows[0]["chosen"] == long
    with pytest.raises(DataError, match="nested too deeply"):
        read(tmp_path, "x.json", "[" * 100_000)


def test_a_text_of_a_file_of_two_columns_may_have_a_comma_in_every_line() -> None:
    (record,) = records_of("x.csv", b'prompt,reply\nwho?,"Here:\nname,age\nBob,3\nAnn,4"\n')
    assert record.value == {"prompt": "who?", "reply": "Here:\nname,age\nBob,3\nAnn,4"}

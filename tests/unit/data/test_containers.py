"""Containers lose nothing: what cannot be read as it was written is refused, with the file and the line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.data.formats import FileRows, read_sources
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


def test_a_csv_header_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.csv: the header names 'chosen' twice"):
        read(tmp_path, "x.csv", "prompt,chosen,rejected,chosen\na,b,c,d\n")


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
    assert refused["position"] == 2 and refused["reason"] == f"the key '{key}' occurs twice"
    kept = json.loads(refused["row"])
    assert '"b"' in json.dumps(kept) and ('"d"' if key == "chosen" else '"a"') in json.dumps(kept)

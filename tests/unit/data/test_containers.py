"""Containers beyond the corpus of malformed files: what is kept of a refused row, lines of faults, limits, paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.data.reading import records_of

from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.errors import DataError

HEADER = "prompt,chosen,rejected\n"
GOOD = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
BIG = "9" * 5000


def read(tmp_path: Path, name: str, content: str) -> FileRows:
    (tmp_path / name).write_text(content, newline="")
    (result,) = read_sources([name], "preferences", tmp_path)
    return result


def test_quoted_line_breaks_commas_and_quotes_stay_in_the_text(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "x.csv", HEADER + '"a\r\nb","c, ""d""",e "f" g\n').rows
    assert (row["prompt"][0]["content"], row["chosen"], row["rejected"]) == ("a\r\nb", 'c, "d"', 'e "f" g')
    # Of a file of two columns, nearly every line of a text could be a row.
    (record,) = records_of("x.csv", b'prompt,reply\nwho?,"Here:\nname,age\nBob,3\nAnn,4"\n')
    assert record.value == {"prompt": "who?", "reply": "Here:\nname,age\nBob,3\nAnn,4"}


@pytest.mark.parametrize(
    ("row", "reason", "kept"),
    [
        (f'{GOOD[:-1]}, "chosen": "d"}}', "the key 'chosen' occurs twice", ("b", "d")),
        (
            '{"prompt": [{"role": "user", "content": "a", "content": "z"}], "chosen": "b", "rejected": "c"}',
            "the key 'content' occurs twice",
            ("a", "z"),
        ),
        (f'{GOOD[:-1]}, "extra": [{{"n": -{BIG}}}]}}', "an integer of 5001 digits", (f"-{BIG}",)),
    ],
    ids=lambda value: value[-30:],
)
@pytest.mark.parametrize("layout", ["[{}, {}]", '{{"data": [{}, {}]}}', "{}\n{}\n"])
def test_a_row_that_json_cannot_hold_is_refused_and_keeps_all_values(
    layout: str, row: str, reason: str, kept: tuple[str, ...], tmp_path: Path
) -> None:
    result = read(tmp_path, "x.jsonl" if layout.endswith("\n") else "x.json", layout.format(GOOD, row))
    (refused,) = result.refused
    assert (refused.position, refused.reason, len(result.rows)) == (2, reason, 1)
    assert all(f'"{text}"' in json.dumps(json.loads(refused.row)) for text in kept)


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

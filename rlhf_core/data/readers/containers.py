"""Read json, jsonl, csv (each also as .gz) and parquet files into records; a broken line is one with a problem."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.readers.json_values import JsonParser, RepeatedKey, problem_in
from rlhf_core.errors import DataError

CONTAINERS = (".json", ".jsonl", ".ndjson", ".csv", ".parquet", "and .gz of all but parquet")
# The csv module refuses fields over 128 KiB by default, but transcripts may be longer.
CSV_FIELD_LIMIT = 16 * 1024 * 1024
# What pyarrow raises for values that no Python value can hold.
CONVERSION_ERRORS = (UnicodeDecodeError, ValueError, OverflowError, pa.ArrowException)


@dataclass(frozen=True)
class Record:
    """One row of a file, as it is.

    Attributes:
        position: Counted from 1: the line in jsonl and csv (of a row of several lines the first), the row elsewhere.
        value: The parsed row, or its raw text if it could not be parsed.
        problem: Why the row could not be parsed.
    """

    position: int
    value: Any
    problem: str = ""


def load_records(path: Path) -> list[Record]:
    """Read every record; ``DataError`` when the file is missing, empty, not what its name says, or of no known kind."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]
    if kind == ".parquet":
        return _parquet(path)
    readers = {".json": _json, ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv}
    if kind not in readers:
        raise DataError(f"{path}: unknown kind of file {kind or 'without suffix'!r}; known are {', '.join(CONTAINERS)}")
    content = _bytes(path)
    if not content.strip():
        raise DataError(f"{path} is empty; give a file with rows, or take it out of the sources")
    return list(readers[kind](path, content))


def _bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix.lower() == ".gz" else content
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; correct the path in collect.files") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); copy or download it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _json(path: Path, content: bytes) -> Iterator[Record]:
    """Read a list of records or ``{"data": [...]}``; a file of JSON lines named .json is read as lines."""
    try:
        value, marked = JsonParser().parse(content)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _json_lines(path, content)
            return
        raise DataError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{path} is not usable JSON: nested too deeply") from error
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        if isinstance(value, RepeatedKey):
            raise DataError(f"{path}: {problem_in(value)}; give one list of rows")
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(f"{path} holds a single JSON {type(value).__name__}; a list of rows is expected")
    for position, row in enumerate(value, 1):
        yield Record(position, row, problem_in(row) if marked else "")


def _json_lines(path: Path, content: bytes) -> Iterator[Record]:
    parser = JsonParser()
    # Split on \n only: other line separators of Unicode are legal inside JSON strings.
    for position, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value, marked = parser.parse(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            yield Record(position, line.decode("utf-8", errors="replace"), f"the line is not valid JSON: {error}")
        else:
            yield Record(position, value, problem_in(value) if marked else "")


def _csv(path: Path, content: bytes) -> Iterator[Record]:
    """Read rows below a header; a quote that is opened and not closed makes every later row uncertain."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    csv.field_size_limit(CSV_FIELD_LIMIT)
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    while True:
        line = rows.line_num + 1
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{path}, line {line}: not readable CSV ({error}); a quote that is opened there is not closed, or a "
                'quote inside quoted text is not doubled (""): correct the line, or save the file as .jsonl'
            ) from error
        if not fields:
            continue
        if not header:
            header = fields
            _require_distinct(path, header)
            continue
        problem = ""
        if len(fields) != len(header):
            problem = "more fields than the header" if len(fields) > len(header) else "fewer fields than the header"
        value: Any = dict(zip(header, fields, strict=True)) if not problem else fields
        yield Record(line, value, problem)


def _require_distinct(path: Path, names: Sequence[str]) -> None:
    """Refuse a table with two columns of one name: a row could hold only one of them."""
    repeated = [name for name, count in Counter(names).items() if count > 1 and name]
    if repeated:
        raise DataError(f"{path}: the header names {repeated[0]!r} twice; rename or remove one of the columns")


def _parquet(path: Path) -> list[Record]:
    try:
        _require_distinct(path, pq.read_schema(path).names)
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; correct the path in collect.files") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error})") from error
    if table.num_rows == 0:
        raise DataError(f"{path} is empty; give a file with rows, or take it out of the sources")
    try:
        return [Record(position, row) for position, row in enumerate(table.to_pylist(), 1)]
    except CONVERSION_ERRORS:
        return _rows_with_bad_values(table)


def _rows_with_bad_values(table: pa.Table) -> list[Record]:
    """Read a table one value at a time: some cannot become Python values (bad UTF-8, a timestamp out of range)."""
    rows: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    problems = [""] * table.num_rows
    for name in table.column_names:
        for index, value in enumerate(table.column(name)):
            try:
                rows[index][name] = value.as_py()
            except CONVERSION_ERRORS as error:
                problems[index] = f"the column {name} cannot be read ({error})"
    return [Record(n, row, problem) for n, (row, problem) in enumerate(zip(rows, problems, strict=True), 1)]

"""Read data files into records, whatever holds them; a broken line is a record with a problem."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.readers.containers.compression import COMPRESSIONS, decompressed
from rlhf_core.data.readers.containers.csv_lines import CsvLines
from rlhf_core.data.readers.containers.foreign_content import require_content, require_narrow_text, require_text
from rlhf_core.data.readers.containers.json_values import JsonParser, RepeatedKey, not_utf8, problem_in
from rlhf_core.data.readers.containers.swallowed_rows import SwallowedRows
from rlhf_core.data.readers.containers.table_checks import (
    DecodedSize,
    as_bytes,
    batch_rows,
    require_one_file,
    require_row_counts,
)
from rlhf_core.errors import DataError

KINDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
# The csv module refuses fields over 128 KiB by default, but transcripts may be longer.
CSV_FIELD_LIMIT = 16 * 1024 * 1024
# What pyarrow raises for values that no Python value can hold; KeyError for a time zone that nobody knows.
CONVERSION_ERRORS = (UnicodeDecodeError, ValueError, OverflowError, KeyError, pa.ArrowException)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


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
    kind_of(str(path))
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; correct the path in collect.files") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return records_of(str(path), content)


def records_of(name: str, content: bytes) -> list[Record]:
    """Read every record of a file's content; ``name`` tells its kind and is what messages call it.

    Raises:
        DataError: It is empty, not what its name says, or of no known kind.
    """
    kind, compression = kind_of(name)
    content = decompressed(name, content, compression)
    records: list[Record] = []
    if content and not content.isspace():
        require_content(name, content)
        if kind in (".parquet", ".arrow"):
            records = table_records(_parquet(name, content) if kind == ".parquet" else _arrow(name, content))
        else:
            require_text(name, content, allow_utf16=kind == ".json")
            records = list(_text_records(name, content, kind))
    if not records:
        raise no_rows(name)
    return records


def no_rows(name: str) -> DataError:
    """Return the error for a file without rows."""
    return DataError(
        f"{name} is empty: there are no rows in it; give a file that has some, or take it out of the sources"
    )


def _text_records(name: str, content: bytes, kind: str) -> Iterator[Record]:
    if kind in (".csv", ".tsv"):
        return csv_records(name, io.BytesIO(content), "," if kind == ".csv" else "\t")
    return _json(name, content) if kind == ".json" else json_line_records(name, io.BytesIO(content))


def kind_of(name: str) -> tuple[str, str]:
    """Return the suffixes that tell what a file is and how it is compressed ("" where it is not)."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes[-1:] and suffixes[-1] in COMPRESSIONS else ""
    kind = suffixes[-1] if suffixes else ""
    if kind not in KINDS:
        given = kind or compression or "without suffix"
        known = f"{', '.join(KINDS)}, each also with {', '.join(COMPRESSIONS)}"
        raise DataError(f"{name}: unknown kind of file {given!r}; known are {known}")
    return kind, compression


def _json(name: str, content: bytes) -> Iterator[Record]:
    """Read a list of records or ``{"data": [...]}``; a file of JSON lines named .json is read as lines."""
    try:
        value, marked = JsonParser().parse(content, json.detect_encoding(content))
    except UnicodeDecodeError as error:
        raise not_utf8(name, error, len(content) - len(error.object)) from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            require_one_list(name, json.loads(error.doc[: error.pos]), str(error))
            yield from json_line_records(name, io.BytesIO(content))
            return
        raise DataError(f"{name} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{name} is not usable JSON: nested too deeply") from error
    yield from json_value_records(name, value, marked)


def json_value_records(name: str, value: Any, marked: bool) -> Iterator[Record]:
    """Yield the rows of a file that is one JSON value: a list of records, or ``{"data": [...]}``.

    Args:
        marked: Whether something inside ``value`` is marked; see
            :mod:`~rlhf_core.data.readers.containers.json_values`.

    Raises:
        DataError: It is another value, or holds several lists of rows.
    """
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        if isinstance(value, RepeatedKey):
            raise DataError(f"{name}: {problem_in(value)}; give one list of rows")
        others = [key for key, rows in value.items() if key != "data" and _is_list_of_rows(rows)]
        if others:
            raise DataError(f"{name} holds lists of rows as 'data' and {others[0]!r}; give each a file of its own")
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(f"{name} holds a single JSON {type(value).__name__}; a list of rows is expected")
    for position, row in enumerate(value, 1):
        yield Record(position, row, problem_in(row) if marked else "")


def require_one_list(name: str, first: Any, extra: str) -> None:
    """Raise ``DataError`` where a list of objects is not all of a file, as ``extra`` says: it is no JSON lines."""
    if _is_list_of_objects(first):
        where = extra.removeprefix("Extra data: ")
        raise DataError(
            f"{name} goes on behind the end of its list, at {where}: join several lists into one, or give each a file "
            "of its own"
        )


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _is_list_of_rows(value: Any) -> bool:
    """Return whether a value is a list of objects, or of lists of turns."""
    is_list = isinstance(value, list) and bool(value) and all(isinstance(row, list) and row for row in value)
    return is_list or _is_list_of_objects(value)


def json_line_records(name: str, stream: BinaryIO) -> Iterator[Record]:
    """Yield the record of every line that is not empty; ``DataError`` for one JSON value over several lines."""
    parser = JsonParser()
    is_first = True
    # Lines of bytes end with \n only: other line separators of Unicode are legal inside JSON strings.
    for position, line in enumerate(stream, 1):
        line = line.removesuffix(b"\n")
        if position == 1:
            require_narrow_text(name, line)
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        if is_first and line.strip() in (b"[", b"{"):
            raise DataError(
                f"{name} holds JSON over several lines, but JSON lines has a row in each; name it .json if it is one "
                "list"
            )
        is_first = False
        try:
            value, marked = parser.parse(line, "utf-8-sig")
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            yield Record(position, line.decode("utf-8", errors="replace"), f"the line is not valid JSON: {error}")
        else:
            yield Record(position, value, problem_in(value) if marked else "")


def csv_records(name: str, stream: BinaryIO, delimiter: str) -> Iterator[Record]:
    """Read rows below a header.

    Raises:
        DataError: A quote that is opened and not closed, or that may swallow rows, makes every later row uncertain; or
            a carriage return in unquoted text splits a row.
    """
    csv.field_size_limit(CSV_FIELD_LIMIT)
    lines = CsvLines(name, stream)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    header_end = ""
    swallowed = SwallowedRows(name, delimiter)
    while True:
        line = rows.line_num + 1
        try:
            fields = next(rows)
        except StopIteration:
            swallowed.require_none()
            return
        except csv.Error as error:
            fault = "a quote that is opened there is not closed"
            if "field limit" in str(error):
                fault = f"a field of more than {CSV_FIELD_LIMIT >> 20} MiB begins there, as where a quote is not closed"
            raise DataError(
                f"{name}, line {line}: not readable CSV ({error}); {fault}, or a quote inside quoted text is not "
                'doubled (""): correct the line, or save the file as .jsonl'
            ) from error
        if header and lines.end == "\r" != header_end:
            raise DataError(
                f"{name}, line {line}: a carriage return in text without quotes splits the row, as some versions of "
                "pandas write it; quote the text, or save the file as .jsonl"
            )
        if not fields:
            continue
        if not header:
            header, header_end = fields, lines.end
            require_distinct(name, header)
            continue
        problem = ""
        if [field.removeprefix("\ufeff") for field in fields] == header:
            problem = "the line repeats the header: files were joined; remove it"
        elif len(fields) != len(header):
            problem = "more fields than the header" if len(fields) > len(header) else "fewer fields than the header"
        swallowed.add(fields, len(header), (line, rows.line_num), lines.end or header_end)
        value: Any = dict(zip(header, fields, strict=True)) if not problem else fields
        yield Record(line, value, problem)


def require_distinct(name: str, columns: Sequence[str]) -> None:
    """Refuse a table with two columns of one name: a row could hold only one of them."""
    repeated = [column for column, count in Counter(columns).items() if count > 1 and column]
    if repeated:
        raise DataError(f"{name}: the header names {repeated[0]!r} twice; rename or remove one of the columns")


def _parquet(name: str, content: bytes) -> pa.Table:
    try:
        with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
            require_one_file(io.BytesIO(content), file.metadata)
            return pa.Table.from_batches(parquet_batches(name, file, len(content)), file.schema_arrow)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are not UTF-8
        raise DataError(f"{name} is not a readable parquet file ({error})") from error


def parquet_batches(name: str, file: pq.ParquetFile, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a parquet file of ``size`` bytes, some hundred at a time; ``DataError`` calls it ``name``.

    Raises:
        DataError: Two columns have one name, or the values are far larger than the file.
        ArrowInvalid: Counts of rows do not agree, or an offset leads out of a column.
    """
    require_distinct(name, file.schema_arrow.names)
    require_row_counts(file)
    decoded, rows = DecodedSize(name, size), 0
    for batch in file.iter_batches(batch_rows(file.metadata)):
        table = pa.Table.from_batches([batch])
        decoded.add(table)
        require_consistent(table)
        rows += batch.num_rows
        yield batch
    if rows != file.metadata.num_rows:
        raise pa.ArrowInvalid(f"its footer counts {file.metadata.num_rows} rows, but it holds {rows}")


def _arrow(name: str, content: bytes) -> pa.Table:
    """Read an Arrow file (feather version 2) or stream, as ``datasets`` writes it."""
    try:
        if content.startswith(b"ARROW1"):
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        else:
            source = pa.BufferReader(content)
            table = pa.ipc.open_stream(source).read_all()
            if not content.endswith(END_OF_STREAM):
                raise pa.ArrowInvalid("the mark of its end is missing: it was cut off, or never closed")
            require_end(source, len(content))
        require_consistent(table)
        DecodedSize(name, len(content)).add(table)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{name} is not a readable arrow file ({error})") from error
    require_distinct(name, table.column_names)
    return table


def require_end(source: pa.NativeFile, size: int) -> None:
    """Raise ``ArrowInvalid`` where a stream that was read to its end is not the whole file, as of two joined ones."""
    if source.tell() < size:
        raise pa.ArrowInvalid(f"{size - source.tell()} bytes follow the end of its stream: save one stream to a file")


def require_consistent(table: pa.Table) -> None:
    """Raise ``ArrowInvalid`` where an offset or index leads out of a column: reading it would crash the process.

    Texts that are not UTF-8 stay: only their rows are refused.
    """
    for chunk in (chunk for column in table.columns for chunk in column.chunks):
        try:
            chunk.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
            as_bytes(chunk).validate(full=True)


def table_records(table: pa.Table, first: int = 1) -> list[Record]:
    """Return the rows of a table, or of a part of it whose first row has the number ``first``."""
    try:
        return [Record(position, row) for position, row in enumerate(table.to_pylist(), first)]
    except CONVERSION_ERRORS:
        return _rows_with_bad_values(table, first)


def _rows_with_bad_values(table: pa.Table, first: int) -> list[Record]:
    """Read a table one value at a time: some cannot become Python values (bad UTF-8, a timestamp out of range)."""
    rows: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    problems = [""] * table.num_rows
    for name in table.column_names:
        for index, value in enumerate(table.column(name)):
            try:
                rows[index][name] = value.as_py()
            except CONVERSION_ERRORS as error:
                problems[index] = f"the column {name} cannot be read ({error})"
    return [Record(n, row, problem) for n, (row, problem) in enumerate(zip(rows, problems, strict=True), first)]

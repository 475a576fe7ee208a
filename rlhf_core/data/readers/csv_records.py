"""Rows of CSV files below their header; uncertain quotes and carriage returns are refused.

Rows between two stray quotes look like one quoted text of several lines. A row is in doubt if each
line of its text would have as many fields as the header without the quotes, as in a table or a
piece of code. A CSV reader cannot tell the two apart, so the rest of the file decides:

- The lines of a text may end differently (``\\n``) from the rows (``\\r\\n``, as Python's csv module
  and spreadsheets write them). Lines of swallowed rows cannot, so such a text is not in doubt.
- Software that quotes the text of one row also quotes that of others, wherever it has a delimiter
  or a line break. Stray quotes stand in files that otherwise need none. So rows in doubt are read
  as they are if they and other quoted rows outnumber the plain ones. Otherwise the whole file is
  refused.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

from rlhf_core.data.readers.json_records import MAX_LINE
from rlhf_core.data.row_counts import Record
from rlhf_core.errors import DataError

# The csv module refuses fields over 128 KiB by default, but transcripts may be longer.
CSV_FIELD_LIMIT = 16 * 1024 * 1024
LINE_ENDS = ("\r\n", "\n", "\r")
SEPARATORS = (",", ";", "\t", "|")
QUOTED = re.compile(r'"[^"]*"')
LINE_BREAK = re.compile(r"\r\n|\n|\r")
# Excel writes, and reads, this line before the header: it says how fields are separated.
SEPARATOR_LINE = re.compile(r"\s*\"?sep=(.)\"?\s*")
# White space and invisible characters that copied headers have around their names.
AROUND_NAMES = " \t\u00a0\ufeff\u200b\u2060"


class CsvLines:
    r"""The lines of a CSV file, and how the latest of them ended.

    ``end`` is ``\n``, ``\r\n``, ``\r``, or "" at the end of the file.
    """

    def __init__(self, name: str, stream: BinaryIO) -> None:
        """Read ``stream``, which messages call ``name``."""
        self._name = name
        self.end = ""
        # Bytes that are not UTF-8 become surrogates, so that the line they are in can be named.
        self._text = io.TextIOWrapper(
            stream, encoding="utf-8-sig", errors="surrogateescape", newline=""
        )

    def __iter__(self) -> Iterator[str]:
        """Yield the lines with their ends.

        Raises:
            DataError: One is not UTF-8, or longer than any row is.
        """
        for number, line in enumerate(iter(partial(self._text.readline, MAX_LINE + 1), ""), 1):
            if len(line) > MAX_LINE:
                raise DataError(
                    f"{self._name}, line {number}, is longer than {MAX_LINE >> 20} MiB, as where a file has no line "
                    "breaks; leave that out, or save the file as .jsonl"
                )
            try:
                line.encode("utf-8")
            except UnicodeEncodeError as error:
                byte = ord(line[error.start]) - 0xDC00
                raise DataError(
                    f"{self._name}, line {number}, is not UTF-8 (byte 0x{byte:02x} after {error.start} characters); "
                    "save the file as UTF-8"
                ) from error
            self.end = next((end for end in LINE_ENDS if line.endswith(end)), "")
            yield line


def _separator(header: str, delimiter: str) -> tuple[str, bool]:
    """Return what separates the columns of a header, and whether a space follows it each time.

    Spreadsheets of many countries write semicolons into files named .csv.
    """
    bare = QUOTED.sub("", header)
    if delimiter not in bare:
        delimiter = max((delimiter, *SEPARATORS), key=bare.count)
    _, *names = header.rstrip("\r\n").split(delimiter)
    is_spaced = all(name.startswith(" ") for name in names)
    return delimiter, bool(names) and is_spaced and not header.startswith("{")


def _could_be_rows(fields: Sequence[str], row_end: str, delimiter: str, is_spaced: bool) -> bool:
    """Return whether the lines of a field would be whole rows without the quotes around it.

    In files of one or two columns nearly every line of a text would be. A delimiter with a space
    behind it is punctuation, unless such spaces are between the fields of the row or of the header
    as well.
    """
    is_spaced = is_spaced or any(field.startswith(" ") for field in fields[1:])
    others = len(fields) - 1
    if others < 2:
        return False
    for index, field in enumerate(fields):
        breaks = LINE_BREAK.findall(field)
        is_punctuation = f"{delimiter} " in field and not is_spaced
        if set(breaks) != {row_end} or is_punctuation:
            continue
        expected = [others - index, *[others] * (len(breaks) - 1), index]
        if [line.count(delimiter) for line in LINE_BREAK.split(field)] == expected:
            return True
    return False


def csv_records(name: str, stream: BinaryIO, delimiter: str) -> Iterator[Record]:
    """Read the rows below a header; a line ``sep=;`` may stand before it.

    Spaces around the names of the header are taken off.

    Raises:
        DataError: A quote that is opened and not closed, or that may swallow rows, makes every
            later row uncertain; or a carriage return in unquoted text splits a row.
    """
    csv.field_size_limit(CSV_FIELD_LIMIT)
    lines = CsvLines(name, stream)
    given = iter(lines)
    begin = [next(given, "")]
    if separator_line := SEPARATOR_LINE.fullmatch(begin[0]):
        delimiter = separator_line[1]
        # An empty line takes its place, so that lines are counted as they are in the file.
        begin = ["\n", next(given, "")]
    delimiter, is_spaced = _separator(begin[-1], delimiter)
    rows = csv.reader(
        chain(begin, given), delimiter=delimiter, strict=True, skipinitialspace=is_spaced
    )
    header: list[str] = []
    header_end = ""
    kinds: Counter[str] = Counter()
    in_doubt: tuple[int, int] | None = None
    while True:
        line = rows.line_num + 1
        try:
            fields = next(rows)
        except StopIteration:
            break
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
            header = [field.strip(AROUND_NAMES) for field in fields]
            header_end = lines.end
            require_distinct(name, header)
            continue
        problem = ""
        if [field.strip(AROUND_NAMES) for field in fields] == header:
            problem = "the line repeats the header: files were joined; remove it"
        elif len(fields) > len(header):
            problem = "more fields than the header"
        elif len(fields) < len(header):
            problem = "fewer fields than the header"
        has_breaks = line != rows.line_num and len(fields) == len(header)
        row_end = lines.end or header_end
        if has_breaks and _could_be_rows(fields, row_end, delimiter, is_spaced):
            kinds["in doubt"] += 1
            in_doubt = in_doubt or (line, rows.line_num)
        elif any(delimiter in field or "\n" in field or "\r" in field for field in fields):
            kinds["quoted"] += 1
        else:
            kinds["plain"] += 1
        value: Any = fields if problem else dict(zip(header, fields, strict=True))
        yield Record(line, value, problem)
    if in_doubt and kinds["quoted"] + kinds["in doubt"] <= kinds["plain"] + 1:
        raise DataError(
            f"{name}, line {in_doubt[0]}: a quoted field runs to line {in_doubt[1]}, over lines that would each be a "
            'row without the quotes: two stray quotes may have swallowed rows. Double the quotes inside text (""), or, '
            "if the field is one text, save the file as .jsonl"
        )


def require_distinct(name: str, columns: Sequence[str]) -> None:
    """Refuse a table with two columns of one name: a row could hold only one of them."""
    repeated = [column for column, count in Counter(columns).items() if count > 1 and column]
    if repeated:
        raise DataError(
            f"{name}: the header names {repeated[0]!r} twice; rename or remove one of the columns"
        )

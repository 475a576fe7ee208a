"""Rows of JSON files: a list is read value by value, JSON lines row by row.

Nothing is lost: a key that occurs twice and an integer too long for Python are marked.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, BinaryIO

from rlhf_core.data.readers.formats import are_all
from rlhf_core.data.row_counts import Record
from rlhf_core.errors import DataError
from rlhf_core.runtime.untrusted_text import without_json_strings

LISTED_KEYS = 8
MAX_DIGITS = 4000  # Python converts at most 4,300 digits to an integer and back
CHUNK = 2**20
# A value of more characters than this is no row of data, so its end is no longer looked for.
MAX_VALUE = 2**28
MAX_LINE = 2**26  # bytes
# A value takes up to 30 times its characters in memory. "[]," many times over fills the memory long
# before it has MAX_VALUE characters.
MAX_ROW_VALUES = 10**6
MAX_FILE_VALUES = 10**7
# A .json file may be JSON lines whose rows are lists. So the rows of a list wait for its end, unless
# it is longer than this.
HELD_CHARACTERS = 2**23
# A value that is cut off may look wrong at most this far before the end of what was read, as in
# "-Infinity" or "\\ud83d".
CUT_OFF = 16
WHITE_SPACE = " \t\n\r"
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
JSON_TYPES = {str: "text", int: "number", float: "number", bool: "truth value", type(None): "null"}


def _separators(text: str | bytes) -> int:
    """Return at least the number of values in JSON without strings."""
    if isinstance(text, str):
        return text.count(",") + text.count("[") + text.count("{")
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _has_more_values(text: str, most: int) -> bool:
    """Return whether JSON, even if cut off, has more than ``most`` values, without parsing it."""
    return _separators(text) > most and _separators(without_json_strings(text)) > most


class RepeatedKey(dict[str, Any]):
    """An object that names ``key`` twice, with its later values as ``KEY (2)``, ``KEY (3)``."""

    key: str = ""


class LongInteger(str):
    """The digits of an integer that is too long to be read as one."""


class JsonParser:
    """A parser for the values of one file."""

    def __init__(self) -> None:
        decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_int=self._integer)
        # The value of a whole text; and the value that begins at a place in it, with its end.
        self.parse = decoder.decode
        self.parse_at = decoder.raw_decode
        self._are_marked = False

    def problem_in(self, value: Any) -> str:
        """Return what is wrong with a value at any depth; empty if it is sound."""
        waiting = [value] if self._are_marked else []
        while waiting:
            item = waiting.pop()
            if isinstance(item, RepeatedKey):
                return f"the key {item.key!r} occurs twice"
            if isinstance(item, LongInteger):
                return f"an integer of {len(item)} digits"
            if isinstance(item, dict):
                waiting += item.values()
            elif isinstance(item, list):
                waiting += item
        return ""

    def _integer(self, digits: str) -> int | LongInteger:
        if len(digits) <= MAX_DIGITS:
            return int(digits)
        self._are_marked = True
        return LongInteger(digits)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) == len(pairs):
            return values
        self._are_marked = True
        marked = RepeatedKey()
        counts: dict[str, int] = {}
        for key, value in pairs:
            counts[key] = counts.get(key, 0) + 1
            marked[key if counts[key] == 1 else f"{key} ({counts[key]})"] = value
        marked.key = next(key for key, count in counts.items() if count > 1)
        return marked


class ExtraData(Exception):
    """Something follows the end of a JSON value, at the place that the message gives."""


class JsonText:
    """The JSON value in a stream: a list is read value by value, another value as a whole.

    Positions in messages are those of the whole text, as :func:`json.loads` gives them.
    """

    def __init__(self, name: str, stream: BinaryIO) -> None:
        """Begin at the start of ``stream``, which messages call ``name``."""
        self._name = name
        self._stream = stream
        self._parser = JsonParser()
        # The text that is no longer held: its characters, its line breaks, and the characters
        # after the last of them.
        self._gone = self._lines = self._column = 0
        self._text = ""
        self._at = 0
        self._bytes = 0  # that were decoded
        self._ended = False
        first = stream.read(CHUNK)
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(first[:4]))(
            "surrogatepass"
        )
        self._text = self._decoded(first)

    @property
    def consumed(self) -> int:
        """How many characters of the text have been read as values."""
        return self._gone + self._at

    def records(self) -> Iterator[Record]:
        """Yield the rows of a list as they are read, and those of ``{"data": [...]}`` at its end.

        Raises:
            ExtraData: Something follows the value.
            DataError: It is no JSON, not of its encoding, nested too deeply, or holds no list of
                rows.
        """
        begin = self._next_character()
        if not begin:
            return
        if begin != "[":
            value = self._value(MAX_FILE_VALUES)
            self._require_end()
            rows = _rows_in(self._name, value, self._parser.problem_in(value))
            for position, row in enumerate(rows, 1):
                yield Record(position, row, self._parser.problem_in(row))
            return
        self._at += 1
        position = 0
        separator = "]" if self._next_character() == "]" else ","
        while separator == ",":
            position += 1
            self._next_character()
            row = self._value(MAX_ROW_VALUES)
            yield Record(position, row, self._parser.problem_in(row))
            separator = self._next_character()
            if separator == ",":
                self._at += 1
        if separator != "]":
            raise self._error("Expecting ',' delimiter", self._at)
        self._at += 1
        self._require_end()

    def _require_end(self) -> None:
        if self._next_character():
            raise ExtraData(self._where(self._at))

    def _value(self, most: int) -> Any:
        """Read the value that begins here, and as much more of the text as it needs.

        Args:
            most: How many values it may hold.
        """
        while True:
            try:
                value, end = self._parser.parse_at(self._text, self._at)
            except json.JSONDecodeError as error:
                is_at_the_end = error.pos >= len(self._text) - CUT_OFF
                is_cut_off = is_at_the_end or error.msg.startswith("Unterminated string")
                if self._ended or not is_cut_off:
                    raise self._error(error.msg, error.pos) from error
                if len(self._text) - self._at > MAX_VALUE:
                    raise DataError(
                        f"{self._name} holds a JSON value of more than {MAX_VALUE >> 20} Mi characters, or one that "
                        f"does not end ({self._where(self._at)}); save the rows as JSON lines"
                    ) from error
            except RecursionError as error:
                raise DataError(f"{self._name} is not usable JSON: nested too deeply") from error
            else:
                # A number may go on behind what was read.
                if self._ended or end < len(self._text) - CUT_OFF:
                    self._at = end
                    return value
            # The beginning of this value, which is parsed again together with what is read now.
            held = self._text[self._at :]
            if _has_more_values(held, most):
                raise DataError(
                    f"{self._name} holds a row of more than {most} values ({self._where(self._at)})"
                )
            self._read(max(CHUNK, len(held)), most)

    def _next_character(self) -> str:
        """Skip white space and return the character behind it; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in WHITE_SPACE:
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read(CHUNK)

    def _read(self, size: int, most: int = MAX_ROW_VALUES) -> None:
        """Drop the text that was read, and read ``size`` more bytes, or until ``most`` values."""
        gone = self._text[: self._at]
        breaks = gone.count("\n")
        self._gone += len(gone)
        self._lines += breaks
        if breaks:
            self._column = len(gone) - gone.rfind("\n") - 1
        else:
            self._column += len(gone)
        part = self._stream.read(CHUNK)
        self._ended = not part
        parts = [part]
        left = size - len(part)
        values = _separators(part)
        while part and left > 0 and values <= most:
            part = self._stream.read(min(CHUNK, left))
            parts.append(part)
            left -= len(part)
            values += _separators(part)
        self._text = self._text[self._at :]
        self._at = 0
        self._text += self._decoded(b"".join(parts))

    def _decoded(self, content: bytes) -> str:
        """Decode the next bytes; ``DataError`` if they are no text."""
        try:
            text = self._decoder.decode(content, self._ended)
        except UnicodeDecodeError as error:
            # The decoder also looks at bytes that it kept from the last call, but not at a byte
            # order mark.
            place = self._bytes + len(content) - len(error.object) + error.start
            before = self._text + error.object[: error.start].decode(error.encoding, "replace")
            raise DataError(
                f"{self._name}, line {self._lines + before.count(chr(10)) + 1}, is not UTF-8 (byte "
                f"0x{error.object[error.start]:02x}, {place} bytes from the start of the file); save it as UTF-8"
            ) from error
        self._bytes += len(content)
        return text

    def _error(self, message: str, position: int) -> DataError:
        return DataError(f"{self._name} is not valid JSON: {message}: {self._where(position)}")

    def _where(self, position: int) -> str:
        """Return the line and column, in the whole text, of a position in the text that is held."""
        before = self._text[:position]
        breaks = before.count("\n")
        column = self._column + position + 1
        if breaks:
            column = position - before.rfind("\n")
        return f"line {self._lines + breaks + 1} column {column} (char {self._gone + position})"


def _rows_in(name: str, value: Any, problem: str) -> list[Any]:
    """Return the rows of an object ``{"data": [...]}``; ``DataError`` for any other value."""
    lists = []
    if isinstance(value, dict):
        for key, rows in value.items():
            if are_all(rows, dict) or (are_all(rows, list) and all(rows)):
                lists.append(key)
        if isinstance(value.get("data"), list):
            if isinstance(value, RepeatedKey):
                raise DataError(f"{name}: {problem}; give one list of rows")
            others = [key for key in lists if key != "data"]
            if others:
                raise DataError(
                    f"{name} holds lists of rows as 'data' and {others[0]!r}; give each a file of its own"
                )
            return list(value["data"])
    if lists:
        listed = ", ".join(repr(key) for key in lists[:LISTED_KEYS])
        raise DataError(
            f"{name} holds an object with lists of rows under {listed}; save each list as a file of its own, or name "
            "it 'data'"
        )
    raise DataError(
        f"{name} holds a single JSON {JSON_TYPES.get(type(value), 'object')}; a list of rows is expected"
    )


def json_records(
    name: str, opened: Callable[[], AbstractContextManager[BinaryIO]]
) -> Iterator[Record]:
    """Yield the rows of a JSON list, of ``{"data": [...]}``, or of JSON lines in a ``.json`` file.

    For JSON lines, the file is opened a second time.
    """
    waiting: list[Record] = []
    are_given = False
    try:
        with opened() as stream:
            text = JsonText(name, stream)
            for record in text.records():
                waiting.append(record)
                if text.consumed > HELD_CHARACTERS:
                    are_given = True
                    yield from waiting
                    waiting = []
        yield from waiting
        return
    except ExtraData as extra:
        if are_all([record.value for record in waiting], dict):
            raise DataError(
                f"{name} goes on behind the end of its list, at {extra}: join several lists into one, or give each a "
                "file of its own"
            ) from extra
        if are_given:
            raise DataError(f"{name} is not valid JSON: Extra data: {extra}") from extra
    with opened() as stream:
        yield from json_line_records(name, stream)


def require_narrow_text(name: str, content: bytes) -> None:
    """Raise ``DataError`` for content that begins as UTF-16 or UTF-32 does."""
    if content.startswith(WIDE_MARKS) or b"\0" in content[:2]:
        raise DataError(f"{name} is not UTF-8 but UTF-16 or UTF-32; save it as UTF-8")


def json_line_records(name: str, stream: BinaryIO) -> Iterator[Record]:
    """Yield the record of every line that is not empty; ``DataError`` if a value spans lines."""
    parser = JsonParser()
    is_first = True
    # Lines of bytes end with \n only. Other line separators of Unicode may stand in JSON strings.
    for position, line in enumerate(iter(partial(stream.readline, MAX_LINE + 2), b""), 1):
        line = line.removesuffix(b"\n")
        if len(line) > MAX_LINE:
            raise DataError(
                f"{name}, line {position}, is longer than {MAX_LINE >> 20} MiB; a line holds one row, so leave that out"
            )
        if position == 1:
            require_narrow_text(name, line)
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        if is_first and line.strip() in (b"[", b"{"):
            raise DataError(
                f"{name} holds JSON over several lines, but JSON lines has a row in each; name it .json if it is one "
                "list"
            )
        is_first = False
        try:
            text = line.decode("utf-8-sig", "surrogatepass")
            if _has_more_values(text, MAX_ROW_VALUES):
                yield Record(position, text, f"the line has more than {MAX_ROW_VALUES} values")
                continue
            value = parser.parse(text)
        except UnicodeDecodeError as error:
            fault = f"not UTF-8 (byte 0x{line[error.start]:02x} after {error.start} bytes); save the file as UTF-8"
        except json.JSONDecodeError as error:
            fault = f"not valid JSON: {error}"
        except RecursionError:
            fault = "not valid JSON: it is nested too deeply"
        else:
            yield Record(position, value, parser.problem_in(value))
            continue
        yield Record(position, line.decode("utf-8", errors="replace"), f"the line is {fault}")

"""Rows of JSON files: a list is read value by value, so that it need not fit the memory; JSON lines row by row.

Nothing is lost: a key that occurs twice and an integer too long for Python are marked.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from rlhf_core.data.readers.content import Record, require_narrow_text
from rlhf_core.errors import DataError

LISTED_KEYS = 8
MAX_DIGITS = 4000  # Python converts at most 4,300 digits to an integer and back
CHUNK = 2**20
# A value of more characters than this is no row of data; its end is not looked for any further.
MAX_VALUE = 2**28
# How far from the end of what was read a value that is cut off there may look wrong: in "-Infinity" or "\\ud83d".
CUT_OFF = 16
WHITE_SPACE = " \t\n\r"
UNTERMINATED = "Unterminated string"
JSON_TYPES = {str: "text", int: "number", float: "number", bool: "truth value", type(None): "null"}


def not_utf8(name: str, error: UnicodeDecodeError, offset: int = 0, lines: int = 0) -> DataError:
    """Return the error for bytes that are no text, with the line and the byte where they are.

    Args:
        name: What messages call the file.
        error: What the decoder says.
        offset: How many bytes of the file are before those that it was given.
        lines: How many line breaks are before them.
    """
    line = lines + error.object[: error.start].decode(error.encoding, "replace").count("\n") + 1
    byte, position = error.object[error.start], offset + error.start
    return DataError(
        f"{name}, line {line}, is not UTF-8 (byte 0x{byte:02x}, {position} bytes from the start of the file); save it "
        "as UTF-8"
    )


class RepeatedKey(dict[str, Any]):
    """An object that names ``key`` twice; its later values are kept as ``KEY (2)``, ``KEY (3)``, and so on."""

    key: str = ""


class LongInteger(str):
    """The digits of an integer that is too long to be read as one."""


class JsonParser:
    """A parser for the values of one file."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_int=self._integer)
        self._marked = False

    def parse(self, content: bytes, encoding: str) -> tuple[Any, bool]:
        """Return the value, and whether anything inside it is marked (see :func:`problem_in`).

        Raises:
            ValueError: It is not JSON, or not of that encoding.
            RecursionError: It is nested too deeply.
        """
        self._marked = False
        value = self._decoder.decode(content.decode(encoding, "surrogatepass"))
        return value, self._marked

    def parse_at(self, text: str, start: int) -> tuple[Any, bool, int]:
        """Return the value that begins at ``start``, whether anything inside it is marked, and where it ends.

        Raises:
            json.JSONDecodeError: No value begins there, or it does not end.
            RecursionError: It is nested too deeply.
        """
        self._marked = False
        value, end = self._decoder.raw_decode(text, start)
        return value, self._marked, end

    def _integer(self, digits: str) -> int | LongInteger:
        if len(digits) <= MAX_DIGITS:
            return int(digits)
        self._marked = True
        return LongInteger(digits)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) == len(pairs):
            return values
        self._marked = True
        marked = RepeatedKey()
        counts: dict[str, int] = {}
        for key, value in pairs:
            counts[key] = counts.get(key, 0) + 1
            marked[key if counts[key] == 1 else f"{key} ({counts[key]})"] = value
        marked.key = next(key for key, count in counts.items() if count > 1)
        return marked


def problem_in(value: Any) -> str:
    """Return what is wrong with a parsed value at any depth; empty if nothing is."""
    waiting = [value]
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


class ExtraData(Exception):
    """Something follows the end of the value: the text is no single value. The message says where."""


class JsonValues:
    """The JSON value in a stream: a list, value by value, or another as a whole.

    Positions in messages are those of the whole text, as :func:`json.loads` gives them.
    """

    def __init__(self, name: str, stream: BinaryIO) -> None:
        """Begin at the start of ``stream``, which messages call ``name``."""
        self._name, self._stream = name, stream
        self._parser = JsonParser()
        first = stream.read(CHUNK)
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(first[:4]))("surrogatepass")
        # Characters, line breaks, and characters since the last of them, in the text that is no longer held.
        self._gone = self._lines = self._column = 0
        self._text, self._at = "", 0
        self._bytes = 0  # those that were decoded
        self._text = self._decoded(first, final=False)
        self._ended = False

    @property
    def consumed(self) -> int:
        """How many characters of the text have been read as values."""
        return self._gone + self._at

    def is_empty(self) -> bool:
        """Whether the text is white space."""
        return not self._next_character()

    def begins_list(self) -> bool:
        """Whether the text begins as a list."""
        return self._next_character() == "["

    def single(self) -> tuple[Any, bool]:
        """Return the value that the text is, and whether something inside it is marked; errors as of a list."""
        value = self._value()
        self._require_end()
        return value

    def of_list(self) -> Iterator[tuple[Any, bool]]:
        """Yield each value of the list, and whether something inside it is marked (see :class:`JsonParser`).

        Raises:
            ExtraData: Something follows the list.
            DataError: It is not JSON, not of its encoding, or nested too deeply.
        """
        self._next_character()
        self._at += 1
        if self._next_character() == "]":
            self._at += 1
        else:
            yield self._value()
            while (separator := self._next_character()) == ",":
                self._at += 1
                self._next_character()
                yield self._value()
            if separator != "]":
                raise self._error("Expecting ',' delimiter", self._at)
            self._at += 1
        self._require_end()

    def _require_end(self) -> None:
        if self._next_character():
            raise ExtraData(f"Extra data: {self._where(self._at)}")

    def _value(self) -> tuple[Any, bool]:
        """Read the value that begins here; more of the text is read until it is all there."""
        while True:
            try:
                value, marked, end = self._parser.parse_at(self._text, self._at)
            except json.JSONDecodeError as error:
                whole = self._ended or (
                    error.pos < len(self._text) - CUT_OFF and not error.msg.startswith(UNTERMINATED)
                )
                if whole:
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
                    return value, marked
            self._read(max(CHUNK, len(self._text) - self._at))

    def _next_character(self) -> str:
        """Skip white space and return the character behind it; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in WHITE_SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read(CHUNK)

    def _read(self, size: int) -> None:
        """Drop the text that has been read as values, and read ``size`` more bytes."""
        gone = self._text[: self._at]
        breaks = gone.count("\n")
        self._gone += len(gone)
        self._lines += breaks
        self._column = len(gone) - gone.rfind("\n") - 1 if breaks else self._column + len(gone)
        content = self._stream.read(size)
        self._ended = not content
        self._text, self._at = self._text[self._at :], 0
        self._text += self._decoded(content, final=self._ended)

    def _decoded(self, content: bytes, final: bool) -> str:
        """Decode the next bytes, which follow the text that is held; ``DataError`` where they are no text."""
        try:
            text = self._decoder.decode(content, final)
        except UnicodeDecodeError as error:
            # The decoder looks at bytes that it kept of the last call, and not at a byte order mark.
            before = self._bytes + len(content) - len(error.object)
            raise not_utf8(self._name, error, before, self._lines + self._text.count("\n")) from error
        self._bytes += len(content)
        return text

    def _error(self, message: str, position: int) -> DataError:
        return DataError(f"{self._name} is not valid JSON: {message}: {self._where(position)}")

    def _where(self, position: int) -> str:
        """Return where a position of the text that is held is in the whole text."""
        before = self._text[:position]
        breaks = before.count("\n")
        column = position - before.rfind("\n") if breaks else self._column + position + 1
        return f"line {self._lines + breaks + 1} column {column} (char {self._gone + position})"


def json_value_records(name: str, value: Any, marked: bool) -> Iterator[Record]:
    """Yield the rows of a file that is one JSON value: a list of records, or ``{"data": [...]}``.

    Args:
        marked: Whether something inside ``value`` is marked; see
            :mod:`~rlhf_core.data.readers.json_values`.

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
    if isinstance(value, dict) and (keys := [key for key, rows in value.items() if _is_list_of_rows(rows)]):
        listed = ", ".join(repr(key) for key in keys[:LISTED_KEYS])
        raise DataError(
            f"{name} holds an object with lists of rows under {listed}; save each list as a file of its own, or name "
            "it 'data'"
        )
    if not isinstance(value, list):
        raise DataError(
            f"{name} holds a single JSON {JSON_TYPES.get(type(value), 'object')}; a list of rows is expected"
        )
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

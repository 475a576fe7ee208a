"""Read the values of a JSON list one after the other, so that the list need not fit the memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from rlhf_core.data.readers.containers.json_values import JsonParser, not_utf8
from rlhf_core.errors import DataError

CHUNK = 2**20
# A value of more characters than this is no row of data; its end is not looked for any further.
MAX_VALUE = 2**28
# How far from the end of what was read a value that is cut off there may look wrong: in "-Infinity" or "\\ud83d".
CUT_OFF = 16
WHITE_SPACE = " \t\n\r"
UNTERMINATED = "Unterminated string"


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

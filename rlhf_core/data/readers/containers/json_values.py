"""Parse JSON without losing anything: a key that occurs twice and an integer too long for Python are marked."""

from __future__ import annotations

import json
from typing import Any

from rlhf_core.errors import DataError

MAX_DIGITS = 4000  # Python converts at most 4,300 digits to an integer and back


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

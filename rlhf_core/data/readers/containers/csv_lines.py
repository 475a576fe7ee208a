"""Lines of CSV files with their ends, as the csv module takes them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO

from rlhf_core.errors import DataError

LINE_ENDS = ("\r\n", "\n", "\r")


class CsvLines:
    r"""The lines of a CSV file. ``end`` is how the latest ended: ``\n``, ``\r\n``, ``\r``, or "" at the file's end."""

    def __init__(self, name: str, stream: BinaryIO) -> None:
        """Read ``stream``, which messages call ``name``."""
        self._name, self.end = name, ""
        # Bytes that are not UTF-8 become surrogates, so that the line they are in can be named.
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")

    def __iter__(self) -> Iterator[str]:
        """Yield the lines with their ends; ``DataError`` for the first that is not UTF-8."""
        for number, line in enumerate(self._text, 1):
            if not line.isascii():
                try:
                    line.encode("utf-8")
                except UnicodeEncodeError as error:
                    byte = ord(line[error.start]) - 0xDC00
                    raise DataError(
                        f"{self._name}, line {number}, is not UTF-8 (byte 0x{byte:02x} after {error.start} "
                        "characters); save the file as UTF-8"
                    ) from error
            self.end = next((end for end in LINE_ENDS if line.endswith(end)), "")
            yield line

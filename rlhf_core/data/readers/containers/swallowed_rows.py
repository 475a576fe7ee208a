"""Find rows of a CSV file that two stray quotes may have made the text of one field."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_core.errors import DataError

LINE_BREAK = re.compile(r"\r\n|\n|\r")


class SwallowedRows:
    r"""Tells rows between two stray quotes from quoted texts of several lines, by what the whole file looks like.

    A row is in doubt where each of its lines would have as many fields as the header without the quotes, be it a table
    or a piece of code within a text. To a CSV reader both are the same, so the rest of the file decides:

    - The lines of a text may end otherwise (``\n``) than the rows (``\r\n``, as Python's csv module and spreadsheets
      write them), but those of swallowed rows cannot: such rows are in no doubt.
    - Software that quotes the text of one row also quotes that of others, wherever it has a delimiter or a line break.
      Stray quotes are in files that need none otherwise. Rows in doubt are thus read as they are where they and other
      quoted rows outnumber the plain ones, and refused, with the whole file, where they do not.
    """

    def __init__(self, name: str, delimiter: str) -> None:
        """Begin with no rows of the file ``name``."""
        self._name, self._delimiter = name, delimiter
        self._plain = self._quoted = self._doubtful = 0
        self._first: tuple[int, int] | None = None

    def add(self, fields: Sequence[str], columns: int, lines: tuple[int, int], row_end: str) -> None:
        """Look at one row.

        Args:
            fields: Its texts.
            columns: How many the header has.
            lines: The first and last line of the row in the file.
            row_end: The line break behind the row.
        """
        if lines[0] != lines[1] and len(fields) == columns and self._could_be_rows(fields, row_end):
            self._doubtful += 1
            self._first = self._first or lines
        elif any(self._delimiter in field or "\n" in field or "\r" in field for field in fields):
            self._quoted += 1
        else:
            self._plain += 1

    def require_none(self) -> None:
        """Raise ``DataError`` where rows are in doubt; to be called once all rows are added."""
        if self._first is None or self._quoted + self._doubtful > self._plain + 1:
            return
        first, last = self._first
        raise DataError(
            f"{self._name}, line {first}: a quoted field runs to line {last}, over lines that would each be a row "
            'without the quotes: two stray quotes may have swallowed rows. Double the quotes inside text (""), or, if '
            "the field is one text, save the file as .jsonl"
        )

    def _could_be_rows(self, fields: Sequence[str], row_end: str) -> bool:
        """Return whether the lines of a field would be rows of as many fields without the quotes around it.

        In files of one or two columns nearly every line of a text would be. A delimiter with a space behind it is
        punctuation, unless the row has such spaces between its fields as well.
        """
        if len(fields) < 3:
            return False
        is_spaced = any(field.startswith(" ") for field in fields[1:])
        others = len(fields) - 1
        for index, field in enumerate(fields):
            breaks = LINE_BREAK.findall(field)
            if not breaks or set(breaks) != {row_end} or (f"{self._delimiter} " in field and not is_spaced):
                continue
            expected = [others - index, *[others] * (len(breaks) - 1), index]
            if [line.count(self._delimiter) for line in LINE_BREAK.split(field)] == expected:
                return True
        return False

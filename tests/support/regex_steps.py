"""Counts the steps of a regular expression by trying it as Python's ``re`` does: from each place,
with backtracking.

Steps, unlike seconds, are the same on every machine, so a test can say how they grow with the text.
"""

from __future__ import annotations

import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Then = Callable[[int], bool]
ANYTHING_BUT = (codes.NOT_LITERAL, codes.NOT_LITERAL_IGNORE)


class TooManySteps(Exception):
    """The search takes more steps than were allowed."""


class StepCounter:
    """Searches for all matches of a pattern in a text, and counts the single comparisons."""

    def __init__(self, pattern: re.Pattern[str], text: str, limit: int) -> None:
        self.text, self.flags, self.limit, self.steps = text, pattern.flags, limit, 0
        self.items = list(parser.parse(pattern.pattern, pattern.flags))
        self.groups: dict[int, tuple[int, int]] = {}

    def match(self) -> int:
        """Try the beginning of the text alone, as ``match`` and ``fullmatch`` do; returns the
        steps.
        """
        with _deep():
            self._sequence(self.items, 0, 0, lambda end: True)
        return self.steps

    def search_all(self) -> int:
        """Find every match as ``finditer`` does; returns the steps."""
        position = 0
        with _deep():
            while position <= len(self.text):
                ends: list[int] = []
                self.groups = {}
                matched = self._sequence(
                    self.items, 0, position, lambda end, ends=ends: not ends.append(end)
                )
                position = max(ends[0], position + 1) if matched else position + 1
        return self.steps

    def _sequence(self, items: list[Any], index: int, position: int, then: Then) -> bool:
        if index == len(items):
            return then(position)
        operation, argument = items[index]
        return self._item(
            operation, argument, position, lambda end: self._sequence(items, index + 1, end, then)
        )

    def _item(self, operation: Any, argument: Any, position: int, then: Then) -> bool:
        self.steps += 1
        if self.steps > self.limit:
            raise TooManySteps
        if operation in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            return self._fits(operation, argument, position) and then(position + 1)
        if operation is codes.SUBPATTERN:
            group, _, _, inner = argument

            def closed(end: int) -> bool:
                if group is not None:
                    self.groups[group] = (position, end)
                return then(end)

            return self._sequence(list(inner), 0, position, closed)
        if operation is codes.BRANCH:
            return any(self._sequence(list(branch), 0, position, then) for branch in argument[1])
        if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            least, most, inner = argument
            if operation is codes.POSSESSIVE_REPEAT:
                return (
                    then(end)
                    if (end := self._possessive(list(inner), least, most, position)) is not None
                    else False
                )
            return self._repeat(
                list(inner), least, most, operation is codes.MAX_REPEAT, position, then
            )
        if operation is codes.ATOMIC_GROUP:
            return (
                then(end)
                if (end := self._first_end(list(argument), position)) is not None
                else False
            )
        if operation in (codes.ASSERT, codes.ASSERT_NOT):
            direction, inner = argument
            start = position if direction > 0 else position - inner.getwidth()[0]
            found = start >= 0 and self._first_end(list(inner), start) is not None
            return then(position) if found == (operation is codes.ASSERT) else False
        if operation is codes.AT:
            return self._at(argument, position) and then(position)
        if operation is codes.GROUPREF:
            start, end = self.groups.get(argument, (0, 0))
            same = self.text[start:end]
            return self.text.startswith(same, position) and then(position + len(same))
        if operation is codes.FAILURE:
            return False
        raise NotImplementedError(str(operation))

    def _repeat(
        self, inner: list[Any], least: int, most: Any, greedy: bool, position: int, then: Then
    ) -> bool:
        single = inner[0] if len(inner) == 1 and inner[0][0] in SINGLE else None
        if single is not None:  # as re does it: a run of single characters, then back through it
            return self._run(single, least, most, greedy, position, then)

        def again(count: int, place: int) -> bool:
            self.steps += 1

            def more() -> bool:
                if count >= most:
                    return False
                return self._sequence(
                    inner, 0, place, lambda end: end != place and again(count + 1, end)
                )

            if count < least:
                return self._sequence(inner, 0, place, lambda end: again(count + 1, end))
            return more() or then(place) if greedy else then(place) or more()

        return again(0, position)

    def _run(
        self, single: Any, least: int, most: Any, greedy: bool, position: int, then: Then
    ) -> bool:
        if not greedy:
            place, count = position, 0
            while True:
                if count >= least and then(place):
                    return True
                if count >= most or not self._fits(*single, place):
                    return False
                place, count = place + 1, count + 1
        end = position
        while end - position < most and self._fits(*single, end):
            end += 1
        return any(then(place) for place in range(end, position + least - 1, -1))

    def _possessive(self, inner: list[Any], least: int, most: Any, position: int) -> int | None:
        count = 0
        while count < most:
            end = self._first_end(inner, position)
            if end is None or end == position:
                break
            position, count = end, count + 1
        return position if count >= least else None

    def _first_end(self, inner: list[Any], position: int) -> int | None:
        ends: list[int] = []
        return (
            ends[0]
            if self._sequence(inner, 0, position, lambda end: not ends.append(end))
            else None
        )

    def _fits(self, operation: Any, argument: Any, position: int) -> bool:
        self.steps += 1
        if self.steps > self.limit:
            raise TooManySteps
        if position >= len(self.text):
            return False
        character = self.text[position]
        if operation is codes.ANY:
            return character != "\n" or bool(self.flags & re.DOTALL)
        if self.flags & re.IGNORECASE:
            character = character.lower()
        if operation is codes.IN:
            return _in_class(argument, character, bool(self.flags & re.IGNORECASE))
        same = character == (chr(argument).lower() if self.flags & re.IGNORECASE else chr(argument))
        return same == (operation is codes.LITERAL)

    def _at(self, where: Any, position: int) -> bool:
        text = self.text
        word = [
            0 <= place < len(text) and (text[place].isalnum() or text[place] == "_")
            for place in (position - 1, position)
        ]
        many = bool(self.flags & re.MULTILINE)
        return {
            codes.AT_BEGINNING: position == 0 or (many and text[position - 1] == "\n"),
            codes.AT_BEGINNING_STRING: position == 0,
            codes.AT_END: text[position:] in ("", "\n") or (many and text[position] == "\n"),
            codes.AT_END_STRING: position == len(text),
            codes.AT_BOUNDARY: word[0] != word[1],
            codes.AT_NON_BOUNDARY: word[0] == word[1],
        }[where]


SINGLE = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
CLASSES = {
    codes.CATEGORY_DIGIT: str.isdigit,
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
}
OPPOSITES = {
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
}


def _in_class(members: list[Any], character: str, ignore_case: bool) -> bool:
    negated, found = False, False
    cases = {character, character.upper()} if ignore_case else {character}
    for kind, value in members:
        if kind is codes.NEGATE:
            negated = True
        elif kind is codes.LITERAL:
            found |= chr(value) in cases
        elif kind is codes.RANGE:
            found |= any(value[0] <= ord(case) <= value[1] for case in cases if len(case) == 1)
        else:
            found |= (
                not CLASSES[OPPOSITES[value]](character)
                if value in OPPOSITES
                else CLASSES[value](character)
            )
    return found != negated


@contextmanager
def _deep() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(200_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def steps(
    pattern: re.Pattern[str], text: str, limit: int = 10**9, *, at_start: bool = False
) -> int:
    """The steps in which all matches of ``pattern`` in ``text`` are found, or one at its beginning.

    Raises:
        TooManySteps: They are more than ``limit``.
    """
    counter = StepCounter(pattern, text, limit)
    return counter.match() if at_start else counter.search_all()


def pieces(pattern: re.Pattern[str]) -> set[str]:
    """Short texts that a pattern's parts fit: what an attacker repeats."""
    found: set[str] = set()
    samples = "aA1 \n\"'\\<>{}[]()/:@.,;=-_|#&%`~!?*+$^日"

    def walk(items: Any) -> str:
        text = ""
        for operation, argument in items:
            if operation is codes.LITERAL:
                text += chr(argument)
            elif operation is codes.IN:
                fitting = [each for each in samples if _in_class(argument, each, False)]
                found.update(fitting[:3])
                text += fitting[0] if fitting else ""
            elif operation is codes.NOT_LITERAL or operation is codes.ANY:
                text += "a"
            elif operation is codes.SUBPATTERN:
                text += walk(argument[3])
            elif operation is codes.BRANCH:
                parts = [walk(branch) for branch in argument[1]]
                found.update(parts[:12])
                text += parts[0]
            elif operation in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
                part = walk(argument[2])
                found.add(part)
                text += part * max(1, argument[0])
            elif operation is codes.ATOMIC_GROUP:
                text += walk(argument)
            elif operation in (codes.ASSERT, codes.ASSERT_NOT):
                found.add(walk(argument[1]))
        found.add(text)
        return text

    whole = walk(parser.parse(pattern.pattern, pattern.flags))
    found |= {whole[:-1], *whole}
    return {text for text in found if text}

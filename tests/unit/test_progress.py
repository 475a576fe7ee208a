"""Progress lines of a stage: every second at first, later every five, and none for what is over at once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rlhf_core.runtime import progress
from rlhf_core.runtime.progress import LineProgress


class Clock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_lines_become_rarer(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineProgress(1000, "sft")
    for _ in range(100):
        clock.seconds += 1.0
        lines.advance(loss=0.25)
    printed = capsys.readouterr().err.splitlines()
    times = [int(line.split()[2]) for line in printed]
    assert printed[0] == "sft: 1/1000 1 s loss 0.25"
    assert times[:8] == list(range(1, 9))
    assert [after - before for before, after in pairwise(times[-4:])] == [5, 5, 5]


def test_what_is_over_within_a_second_prints_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineProgress(2, "sft")
    clock.seconds += 0.9
    lines.advance(2)
    lines.close()
    assert capsys.readouterr().err == ""


def test_the_last_line_is_printed_once(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineProgress(2, "sft")
    clock.seconds += 4.0
    lines.advance(2)
    lines.close()
    assert capsys.readouterr().err == "sft: 2/2 4 s\n"

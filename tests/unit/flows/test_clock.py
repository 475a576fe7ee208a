"""The system date may change during a run: durations stay right, and new files are recognised without their age."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from flows.stage.outcome import load_gate_file
from flows.supervision.signals import Stopwatch, WallClock

HOURS = 7200.0


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Return a function that moves the wall clock by some seconds; the monotonic clock is left alone."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    def by(seconds: float) -> None:
        shift[0] += seconds

    return by


@pytest.mark.parametrize("seconds", [HOURS, -HOURS])
def test_a_duration_is_not_affected_by_a_jump_of_the_clock(move, seconds: float) -> None:  # type: ignore[no-untyped-def]
    watch = Stopwatch()
    move(seconds)
    assert 0 <= watch.seconds < 60 and 0 <= watch.now - watch.started < 60


def test_a_clock_set_back_is_reported_once_and_one_set_forward_never(move) -> None:  # type: ignore[no-untyped-def]
    clock = WallClock()
    assert clock.seconds_set_back() == 0.0
    move(-HOURS)
    assert clock.seconds_set_back() == pytest.approx(HOURS, abs=60) and clock.seconds_set_back() == 0.0
    move(HOURS)
    assert clock.seconds_set_back() == 0.0
    move(-HOURS)
    assert clock.seconds_set_back() == pytest.approx(HOURS, abs=60)


def test_small_steps_back_add_up(move) -> None:  # type: ignore[no-untyped-def]
    clock = WallClock()
    reported = []
    for _ in range(4):
        move(-25)
        reported.append(clock.seconds_set_back())
    assert reported[:2] == [0.0, 0.0] and reported[2] == pytest.approx(75, abs=5) and reported[3] == 0.0


def test_gate_evidence_is_new_when_it_was_written_even_if_its_time_is_hours_ago(tmp_path: Path) -> None:
    path = tmp_path / "gates" / "reward.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"passed": False}))
    outputs = ("gates/reward.json",)
    before = load_gate_file(tmp_path, outputs)
    assert before is not None and before[0] == {"passed": False}
    assert load_gate_file(tmp_path, outputs) == before
    path.unlink()
    path.write_text(json.dumps({"passed": False}))
    os.utime(path, (1.0, 1.0))
    after = load_gate_file(tmp_path, outputs)
    assert after is not None and after[0] == before[0] and after != before
    assert load_gate_file(tmp_path, ("models/x",)) is None

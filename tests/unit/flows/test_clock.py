"""The date may be set while something runs: durations stay right, and what is new is known by change, not by age."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from flows.stage.outcome import gate_evidence
from flows.supervision.clock import Stopwatch, WallClock

HOURS = 7200.0


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Sets the wall clock forward or back; the monotonic clock stays."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    def by(seconds: float) -> None:
        shift[0] += seconds

    return by


@pytest.mark.parametrize("seconds", [HOURS, -HOURS])
def test_a_duration_does_not_know_of_the_jump(move, seconds: float) -> None:  # type: ignore[no-untyped-def]
    watch = Stopwatch()
    move(seconds)
    assert 0 <= watch.seconds < 60 and 0 <= watch.now - watch.started < 60


def test_a_clock_set_back_is_told_once_and_one_set_forward_never(move) -> None:  # type: ignore[no-untyped-def]
    clock = WallClock()
    assert clock.set_back() == 0.0
    move(-HOURS)
    assert clock.set_back() == pytest.approx(HOURS, abs=60) and clock.set_back() == 0.0
    move(HOURS)
    assert clock.set_back() == 0.0
    move(-HOURS)
    assert clock.set_back() == pytest.approx(HOURS, abs=60)


def test_small_steps_back_add_up(move) -> None:  # type: ignore[no-untyped-def]
    clock = WallClock()
    told = []
    for _ in range(4):
        move(-25)
        told.append(clock.set_back())
    assert told[:2] == [0.0, 0.0] and told[2] == pytest.approx(75, abs=5) and told[3] == 0.0


def test_gate_evidence_is_new_when_it_was_written_even_if_its_time_is_hours_ago(tmp_path: Path) -> None:
    path = tmp_path / "gates" / "reward.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"passed": False}))
    outputs = ("gates/reward.json",)
    report, mark = gate_evidence(tmp_path, outputs)
    assert report == {"passed": False} and gate_evidence(tmp_path, outputs)[1] == mark
    path.unlink()
    path.write_text(json.dumps({"passed": False}))
    os.utime(path, (1.0, 1.0))
    assert gate_evidence(tmp_path, outputs)[1] != mark
    assert gate_evidence(tmp_path, ("models/x",)) == (None, None)

"""Pauses between attempts, and what a run makes of a system date that changes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import flows.supervision.signals  # noqa: F401
from flows.stage import StageOutcome, load_gate_file
from flows.supervision.signals import Stopwatch, WallClock, retry

RETRY = sys.modules["flows.supervision.signals"]


class FakeClock:
    """Stands in for the stop flag and the monotonic clock of the retry policy; ``pauses`` are the
    waits so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: float = float("inf")) -> None:
        self.pauses: list[float] = []
        self.stop_at = stop_at
        monkeypatch.setattr(RETRY, "STOP", self)
        monkeypatch.setattr(RETRY.time, "monotonic", lambda: sum(self.pauses))

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return sum(self.pauses) >= self.stop_at


def failing(times: int, error: Exception) -> Callable[[], str]:
    """An attempt that fails the first ``times`` times."""
    left = [times]

    def attempt() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "done"

    return attempt


def is_transient(error: Exception) -> bool:
    return isinstance(error, OSError)


def test_it_returns_the_first_success_and_reports_every_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, reported = FakeClock(monkeypatch), list[str]()
    assert retry(failing(2, OSError("down")), 100, is_transient, reported.append) == "done"
    assert clock.pauses == [2, 4]
    assert reported == ["down; trying again in 2 s", "down; trying again in 4 s"]


def test_pauses_double_up_to_a_minute_and_end_with_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(monkeypatch)
    with pytest.raises(OSError, match="down"):
        retry(failing(99, OSError("down")), 190, is_transient, lambda _: None)
    assert clock.pauses == [2, 4, 8, 16, 32, 60, 60]  # 182 s; another 60 would exceed 190


def test_other_errors_are_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    with pytest.raises(ValueError):
        retry(failing(1, ValueError()), 100, is_transient, lambda _: None)
    assert clock.pauses == []


def test_a_raised_stop_flag_ends_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch, stop_at=6)
    with pytest.raises(KeyboardInterrupt):
        retry(failing(99, OSError()), 100, is_transient, lambda _: None)
    assert clock.pauses == [2, 4]


HOURS = 7200.0


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Return a function that moves the wall clock by some seconds; the monotonic clock is left
    alone.
    """
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
    assert (
        clock.seconds_set_back() == pytest.approx(HOURS, abs=60) and clock.seconds_set_back() == 0.0
    )
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
    assert (
        reported[:2] == [0.0, 0.0]
        and reported[2] == pytest.approx(75, abs=5)
        and reported[3] == 0.0
    )


def test_gate_evidence_is_new_when_it_was_written_even_if_its_time_is_hours_ago(
    tmp_path: Path,
) -> None:
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


def test_a_stage_whose_clock_was_set_back_took_no_negative_time() -> None:
    outcome = StageOutcome.failed("ppo", "killed", started=100.0, ended=40.0, work_seconds=-60.0)
    assert outcome.ended == outcome.started and outcome.work_seconds == 0.0


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (StageOutcome.stopped("ppo"), "ppo: stopped"),
        (StageOutcome.failed("ppo", "failed"), "ppo: failed"),
        (StageOutcome.failed("ppo", "no: step 3"), "ppo: failed no: step 3"),
        (StageOutcome("ppo", "cached"), "ppo: cached"),
        (StageOutcome("ppo", "ran", message="2 retries"), "ppo: ran 2 retries"),
    ],
)
def test_the_line_of_a_stage_says_a_word_once(outcome: StageOutcome, line: str) -> None:
    assert outcome.line == line

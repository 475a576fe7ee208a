"""The retry policy: growing pauses, an end to the attempts, and errors that are not tried again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from unit.flows.fake_clock import FakeClock

from flows.supervision.signals import StopRequested, retry


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


def test_it_returns_the_first_success_and_reports_every_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reported = FakeClock(monkeypatch), list[str]()
    assert retry(failing(2, OSError("down")), 100, is_transient, reported.append) == "done"
    assert clock.pauses == [2, 4]
    assert reported == ["down; trying again in 2 s", "down; trying again in 4 s"]


def test_pauses_double_up_to_a_minute_and_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(StopRequested):
        retry(failing(99, OSError()), 100, is_transient, lambda _: None)
    assert clock.pauses == [2, 4]

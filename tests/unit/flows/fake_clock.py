"""A clock for the retry policy that passes only while the code under test pauses."""

from __future__ import annotations

import sys

import pytest

import flows.supervision.signals  # noqa: F401

RETRY = sys.modules["flows.supervision.signals"]


class FakeClock:
    """Stands in for the stop flag and the monotonic clock of the retry policy; ``pauses`` are the waits so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: float = float("inf")) -> None:
        self.pauses: list[float] = []
        self.stop_at = stop_at
        monkeypatch.setattr(RETRY, "STOP", self)
        monkeypatch.setattr(RETRY.time, "monotonic", lambda: sum(self.pauses))

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return sum(self.pauses) >= self.stop_at

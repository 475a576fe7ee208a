"""What a stage says while it runs, and what SIGTERM does to it: at once, at the next safe point, or
forwarded.
"""

from __future__ import annotations

import io
import os
import re
import signal
import time
from itertools import pairwise

import pytest

from rlhf_core.errors import EXIT_PREEMPTED, Preempted
from rlhf_core.runtime import preemption, progress
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.runtime.progress import LineProgress


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stage_without_safe_points_stops_at_once_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handled = PreemptionSignal().handled("validate")
    with pytest.raises(Preempted, match="validate was stopped by SIGTERM") as raised, handled:
        try:
            sigterm()
        except Exception:
            pytest.fail("a handler of ordinary errors has swallowed it")
    assert raised.value.exit_code == EXIT_PREEMPTED == 75
    assert signal.getsignal(signal.SIGTERM) is before


def test_training_continues_to_its_safe_point_however_many_forward_the_request() -> None:
    done, stop = 0, PreemptionSignal()
    message = "sft made step 3 of 9 .* its state is saved"
    with pytest.raises(Preempted, match=message), stop.handled("sft"), stop.deferred():
        while not stop.requested():
            done += 1
            if done == 3:
                sigterm()
                sigterm()
        stop.raise_preempted(f"sft made step {done} of 9", saved=True)
    assert done == 3


def test_a_second_request_stops_training_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "SAME_REQUEST_SECONDS", 0.0)
    stop = PreemptionSignal()
    with pytest.raises(Preempted, match="before it was done"), stop.handled("sft"), stop.deferred():
        sigterm()
        assert stop.received
        sigterm()
        pytest.fail("training went on")


def test_a_stage_that_is_already_stopping_is_not_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preemption, "SAME_REQUEST_SECONDS", 0.0)
    cleaned = []
    with pytest.raises(Preempted), PreemptionSignal().handled("sft"):
        try:
            sigterm()
        finally:
            sigterm()
            cleaned.append(True)
    assert cleaned == [True]


def test_a_launcher_forwards_the_request_to_its_ranks() -> None:
    reached: list[int] = []

    def forward() -> bool:
        reached.append(7)
        return True

    stop = PreemptionSignal()
    with stop.handled("ppo"), stop.forwarded(forward):
        sigterm()
        assert reached == [7] and stop.received


def test_a_launcher_without_ranks_stops_itself() -> None:
    stop = PreemptionSignal()
    with pytest.raises(Preempted), stop.handled("ppo"), stop.forwarded(lambda: False):
        sigterm()
        pytest.fail("nothing was there to forward it to")


def test_a_request_to_one_stage_is_none_to_the_next() -> None:
    first, second = PreemptionSignal(), PreemptionSignal()
    with pytest.raises(Preempted), first.handled("sft"):
        sigterm()
    assert first.received
    with second.handled("reward"):
        assert not second.received and not second.requested()


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


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [(0.9, ""), (4.0, "sft: 2/2 4 s\n")],
    ids=["within a second", "later: its last line once"],
)
def test_what_a_short_work_prints(
    clock: Clock, capsys: pytest.CaptureFixture[str], seconds: float, printed: str
) -> None:
    lines = LineProgress(2, "sft")
    clock.seconds += seconds
    lines.advance(2)
    lines.close()
    assert capsys.readouterr().err == printed


def test_a_large_number_has_no_exponent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineProgress(2, "sft")
    clock.seconds += 4.0
    lines.advance(2, loss=1.12345, tokens_s=17843.2, lr=1e-5)
    assert capsys.readouterr().err == "sft: 2/2 4 s loss 1.123 tokens_s 17843 lr 1e-05\n"


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True

    def wait_for(self, pattern: str, start: int) -> str:
        """Return what was written from ``start`` on, as soon as it holds ``pattern``."""
        deadline = time.monotonic() + 30
        while not re.search(pattern, text := self.getvalue()[start:]):
            assert time.monotonic() < deadline, text
            time.sleep(0.02)
        return text


def test_a_bar_takes_the_place_of_what_a_command_is_busy_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.busy("loading"):
        terminal.wait_for("loading", 0)
        with progress.progress(2, "sft") as bar:
            start = len(terminal.getvalue())
            bar.advance()
            time.sleep(0.3)  # for several frames of either
            assert "loading" not in terminal.wait_for("sft.*1/2", start)
            start = len(terminal.getvalue())
        terminal.wait_for("loading", start)
    end = terminal.getvalue()
    time.sleep(0.3)
    assert terminal.getvalue() == end


def test_where_there_is_no_terminal_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a pipe a terminal for rich
    with progress.busy("loading"), progress.progress(2, "sft") as bar:
        bar.advance()
    assert capsys.readouterr() == ("", "")

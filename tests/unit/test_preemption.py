"""What SIGTERM does to a stage: at once, at the next safe point, or passed on."""

from __future__ import annotations

import os
import signal

import pytest

from rlhf_core import preemption
from rlhf_core.errors import EXIT_PREEMPTED, Preempted


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stage_without_safe_points_stops_at_once_and_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="validate was stopped by SIGTERM") as raised, preemption.heeded("validate"):
        try:
            sigterm()
        except Exception:
            pytest.fail("a handler of ordinary errors has swallowed it")
    assert raised.value.exit_code == EXIT_PREEMPTED == 75
    assert signal.getsignal(signal.SIGTERM) is before


def test_training_goes_on_to_its_safe_point_however_many_pass_the_one_wish_on() -> None:
    done = 0
    message = "sft made step 3 of 9 .* its state is saved"
    with pytest.raises(Preempted, match=message), preemption.heeded("sft"), preemption.at_safe_points():
        while not preemption.wanted():
            done += 1
            if done == 3:
                sigterm()
                sigterm()
        preemption.leave(f"sft made step {done} of 9", saved=True)
    assert done == 3


def test_a_second_wish_stops_training_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "SAME_WISH_SECONDS", 0.0)
    with pytest.raises(Preempted, match="before it was done"), preemption.heeded("sft"), preemption.at_safe_points():
        sigterm()
        assert preemption.heard()
        sigterm()
        pytest.fail("training went on")


def test_who_is_on_the_way_out_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "SAME_WISH_SECONDS", 0.0)
    cleaned = []
    with pytest.raises(Preempted), preemption.heeded("sft"):
        try:
            sigterm()
        finally:
            sigterm()
            cleaned.append(True)
    assert cleaned == [True]


def test_a_launcher_passes_it_on_unless_nobody_is_there_yet() -> None:
    ranks: list[int] = []
    told: list[int] = []

    def relay() -> bool:
        told.extend(ranks)
        return bool(ranks)

    with pytest.raises(Preempted), preemption.heeded("ppo"), preemption.relayed(relay):
        ranks.append(7)
        sigterm()
        assert told == [7]
        ranks.clear()
        preemption._state.heard = None
        sigterm()
        pytest.fail("nobody was there to hear it")


def test_one_stage_does_not_answer_for_the_one_before() -> None:
    with pytest.raises(Preempted), preemption.heeded("sft"):
        sigterm()
    assert not preemption.heard()
    with preemption.heeded("reward"):
        assert not preemption.heard() and not preemption.wanted()

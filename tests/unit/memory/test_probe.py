"""The forecast of time: a machine that was tried, multiplied by what settings ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from flows.commands.doctor import forecast_checks
from rlhf_core.config.loading import Params, check_params
from rlhf_core.stages.pair_supply import DataSupply
from rlhf_core.stages.row_tokens import RowLengths
from rlhf_extras.memory import probe
from rlhf_extras.memory.probe import (
    STAGE_SECONDS,
    Machine,
    MachineLoad,
    ProcessorTimes,
    data_shape,
    forecast_time,
)
from rlhf_extras.memory.workload import DataShape, Work, work_of_stage, working_stages

DATA = DataShape(10, 20, 30)


def machine(**changes: object) -> Machine:
    """One that takes a millisecond for each token that it reads, and three to train on one."""
    params = check_params({"ppo": {"max_new_tokens": 40}, **changes})
    kinds = {(scalar, None) for scalar in (False, True)}
    return Machine(
        params, DATA, read=dict.fromkeys(kinds, 1e-3), train=dict.fromkeys(kinds, 3e-3),
        step=dict.fromkeys(kinds, 0.5), token=(0.1, 0.01),
    )  # fmt: skip


def test_passes_are_multiplied_by_what_was_tried() -> None:
    here = machine()
    assert here.seconds(Work("", "read", 4, 10, 20, times=5)) == pytest.approx(0.6)
    assert here.seconds(Work("", "train", 4, 10, 20, times=5)) == pytest.approx(5 * (0.36 + 0.5))
    adapters = Work("", "train", 4, 10, 20, times=5, adapters=True)
    assert here.seconds(adapters) == pytest.approx(5 * 0.36 * 2 / 3)
    # 12 replies in two batches; the longest has 40 tokens, and prompts are read first.
    sampled = Work("", "sample", 12, 10, 20, times=3, at_once=8)
    assert here.seconds(sampled) == pytest.approx(3 * (0.12 + 2 * 40 * 0.1 + 12 * 20 * 0.01))


def test_stages_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.os, "cpu_count", lambda: 2)
    quiet = MachineLoad(cores=2)
    found = machine(compute={"threads": 1}, flow={"parallel": 3}).forecast(1.0, quiet)
    work = {stage: work_of_stage(machine().params, stage, DATA) for stage in found.seconds}
    here = machine()
    for stage, passes in work.items():
        alone = STAGE_SECONDS + sum(here.seconds(one) for one in passes)
        assert found.seconds[stage] == pytest.approx(alone)
    worked = probe.seconds_side_by_side(found.seconds, 3, at_full_speed=2)
    assert found.total == pytest.approx(probe.RUN_SECONDS + worked)
    assert "reward" in found.conclusion and "on this machine" in found.conclusion


ALONE = {
    "base": 10,
    "sft": 5,
    "reward": 30,
    "referee": 20,
    "judge": 25,
    "critic": 8,
    "ppo": 40,
    "evaluate": 6,
}


@pytest.mark.parametrize(
    ("slots", "at_full_speed", "expected"),
    [
        (1, 1, 144),  # one after the other
        (2, 1, 144),  # side by side at half the speed
        (2, 2, 10 + 5 + 30 + 8 + 40 + 6),  # the judge beside reward model, critic and PPO
        (3, 3, 10 + 5 + 30 + 8 + 40 + 6),  # beside both others from the start
        # Three on two cores until the referee has its 20 after 30 seconds, each with 20 done; then two
        # at full speed: 5 more of the judge, 10 of the reward model.
        (3, 2, 10 + 5 + 30 + 10 + 8 + 40 + 6),
    ],
)
def test_stages_side_by_side_take_as_long_as_the_longest_way(
    slots: int, at_full_speed: float, expected: float
) -> None:
    assert probe.seconds_side_by_side(ALONE, slots, at_full_speed) == pytest.approx(expected)


def test_a_judge_that_takes_longest_is_waited_for_before_the_evaluation() -> None:
    slow = ALONE | {"judge": 200}
    assert probe.seconds_side_by_side(slow, 3, 3) == pytest.approx(10 + 5 + 200 + 6)
    without_pairs = {"sft": 5, "ppo": 40, "evaluate": 6}
    assert probe.seconds_side_by_side(without_pairs, 2, 2) == pytest.approx(51)


def test_a_busy_machine_is_named_with_the_time_that_its_load_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe.os, "cpu_count", lambda: 2)
    started = ProcessorTimes(clock=100.0, all_processes=50.0, this_process=7.0)
    # In ten seconds this process ran for four, and others for fifteen.
    load = ProcessorTimes(110.0, 69.0, 11.0).load_since(started, threads=1)
    assert (load.cores, load.others, load.share) == (2, 1.5, pytest.approx(0.4))
    busy = machine().forecast(1.0, load)
    assert "other processes take 1.5 of its 2 cores" in busy.conclusion
    assert probe.duration(busy.total / 0.4) in busy.conclusion
    alone = ProcessorTimes(110.0, 60.2, 16.9).load_since(started, threads=1)
    quiet = machine().forecast(1.0, alone)
    assert not alone.is_busy and "busy" not in quiet.conclusion
    assert quiet.seconds == busy.seconds and quiet.total == busy.total


def test_few_pairs_take_few_steps() -> None:
    """Rows of 30 tokens are 16 pairs in 1,000 positions."""
    params = check_params(
        {"reward": {"steps": 50, "max_epochs": 3, "batch": {"token_budget": 1000}}}
    )
    for pairs, steps in ((None, 50), (160, 30), (161, 33), (5000, 50)):
        known = {} if pairs is None else {"reward": pairs}
        data = replace(DATA, training_rows=known)
        update = next(one for one in work_of_stage(params, "reward", data) if one.phase == "update")
        assert update.times == steps
        others = work_of_stage(params, "judge", data)
        assert others[0].times == params.judge.steps


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Params]:
    """Settings of a tiny model, and a probe that tries each pass once."""
    monkeypatch.delenv(probe.SWITCH, raising=False)
    monkeypatch.setattr(probe, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(probe, "SAMPLE_ROWS", 8)
    monkeypatch.setattr(probe, "PASS_FLOPS", 1e6)
    yield check_params(
        {
            "base": {"hidden_size": 16, "intermediate_size": 16, "layers": 1, "heads": 2, "vocab_size": 64},
            "compute": {"threads": 1},
            "ppo": {"batch_size": 4, "minibatches": 1},
        }
    )  # fmt: skip


def test_a_machine_is_tried_for_all_kinds_of_passes(small: Params, tmp_path: Path) -> None:
    ticks = count()
    found = forecast_time(tmp_path, small, DataSupply(), clock=lambda: float(next(ticks)))
    assert found is not None and tuple(found.seconds) == working_stages(small)
    assert all(seconds > STAGE_SECONDS for seconds in found.seconds.values())
    checks = forecast_checks(tmp_path, small, probe=True)
    (check,) = [check for check in checks if check.name == "hours"]
    assert check.finding.startswith("about ")


def test_seconds_are_those_of_a_quiet_machine_however_busy_it_is(
    small: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others slow the wall clock by any factor; the processor time of a pass stays the same."""
    found = []
    for slower in (1.0, 8.0):
        ticks, wall = count(), count()
        began = ProcessorTimes(0.0, 0.0, 0.0)
        ended = ProcessorTimes(100.0 * slower, 200.0 * slower - 100.0, 100.0)
        times = iter([began, ended])
        with monkeypatch.context() as changed:
            changed.setattr(probe.time, "thread_time", lambda ticks=ticks: float(next(ticks)))
            changed.setattr(
                probe.time,
                "perf_counter",
                lambda wall=wall, slower=slower: slower * next(wall),
            )
            changed.setattr(ProcessorTimes, "now", lambda times=times: next(times))
            found.append(forecast_time(tmp_path, small, DataSupply()))
    quiet, busy = found
    assert quiet is not None and busy is not None
    assert busy.seconds == pytest.approx(quiet.seconds) and busy.total == pytest.approx(quiet.total)
    assert (quiet.tried, busy.tried) == (100.0, 800.0), "what it took is the wall clock's"
    assert busy.load.is_busy and not quiet.load.is_busy
    assert probe.duration(8 * busy.total) in busy.conclusion


def test_what_cannot_be_tried_in_seconds_is_left_out(
    small: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = small.model_copy(
        update={"base": small.base.model_copy(update={"source": "./no-model-here"})}
    )
    assert forecast_time(tmp_path, absent, DataSupply()) is None
    unable = {
        "MOST_PARAMETERS": 10,  # a large model
        "PASS_FLOPS": 1.0,  # long rows, of which one takes more than seconds
        "available_memory": lambda: 1000,  # a machine that is in use
        "positions_of": lambda config: 8,  # rows longer than the model reads
        "data_shape": lambda *_: {}["what no forecast is worth"],
    }
    for name, value in unable.items():
        with monkeypatch.context() as changed:
            changed.setattr(probe, name, value)
            assert forecast_time(tmp_path, small, DataSupply()) is None, name
    monkeypatch.setenv(probe.SWITCH, "0")
    assert forecast_time(tmp_path, small, DataSupply()) is None


def test_lengths_are_those_of_the_rows(small: Params) -> None:
    files = {"source": "files", "files": {"preferences": ["pairs.jsonl"]}}
    params = check_params({"collect": files, "ppo": {"max_new_tokens": 3}})
    assert data_shape(params, DataSupply()) is None, "no tokenizer is here that counts them"
    pairs = np.array([[10, 4], [14, 4]])  # with the longer reply; the chosen one alone
    known = DataSupply(lengths=RowLengths({"preferences": pairs}, "the rows of the files"))
    found = data_shape(params, known)
    assert found is not None
    assert (found.prompt, found.reply) == (8, 3), "replies end at the limit"
    prompts = RowLengths({"prompts": np.array([[6, 0]])}, "the rows of the files")
    found = data_shape(params, DataSupply(lengths=prompts))
    assert found is not None and (found.prompt, found.reply) == (6, 1.5)
    world = data_shape(small, DataSupply())
    assert world is not None and 5 < world.reply < 60 and world.text > 5

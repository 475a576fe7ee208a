"""The table of a run: progress read from logs, results of stages, and rows that fit any
terminal.
"""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.commands.display import Display, StageTable
from flows.commands.run_state import (
    RESULTS,
    RunState,
    StageProgress,
    describe_result,
    describe_stage,
)
from flows.commands.text import format_metrics, format_rate, format_seconds
from flows.pipeline.events import RunPlanned, StageEnded, StageRepeated, StageStarted
from flows.stage import StageOutcome, last_progress
from flows.supervision.signals import Stopwatch

STAGES = tuple(f"stage-{number:02}" for number in range(13))


def progress_of(log: Path, *lines: str, written: float = 100.0) -> StageProgress:
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("\n".join(lines) + "\n")
    os.utime(log, (written, written))
    progress = StageProgress(log, 0)
    progress.refresh()
    return progress


def test_a_progress_line_gives_its_time_and_metrics() -> None:
    logged = last_progress(
        "x\nsft: 63/550 4 s\nsft: 64/550 5 s loss 1.121 tokens_s 1.547e+04\nother"
    )
    assert logged is not None and (logged.done, logged.total, logged.seconds) == (64, 550, 5.0)
    assert logged.description == "sft" and logged.line.startswith("sft: 64/550 5 s")
    assert logged.metrics == {"loss": 1.121, "tokens_s": 15470.0}
    bare = last_progress("ppo: 3/9\n")
    assert bare is not None and bare.seconds is None and bare.metrics == {}


def test_rate_and_time_left_are_those_of_this_process(tmp_path: Path) -> None:
    # It went on from step 50: 10 more steps took 20 s, so the 30 that are left take 60 s, of which
    # 5 have gone by.
    progress = progress_of(
        tmp_path / "ppo.log", "ppo: 50/90 1 s", "ppo: 55/90 11 s", "ppo: 60/90 21 s kl 1.5"
    )
    assert progress.rate == pytest.approx(0.5)
    assert progress.seconds_left(105.0) == pytest.approx(55.0)
    assert progress.seconds_left(1000.0) is None


@pytest.mark.parametrize(
    "lines",
    [
        ["ppo: 3/9", "ppo: 4/9"],  # no times
        ["checking rows: 6000/14916 0 s"],
        ["sft: 300/550 2 s loss 1.2"],  # mostly steps of an earlier process
        ["sft: 40/50 100 s", "sft: 10/50 5 s"],  # a retry in the same log
    ],
)
def test_there_is_no_rate_before_two_measurements(tmp_path: Path, lines: list[str]) -> None:
    progress = progress_of(tmp_path / "stage.log", *lines)
    assert progress.latest is not None and progress.latest.line == lines[-1]
    assert progress.rate is None and progress.seconds_left() is None


def test_a_resumed_stage_is_measured_from_where_it_resumed(tmp_path: Path) -> None:
    progress = progress_of(
        tmp_path / "ppo.log", "ppo: 10/90 1 s", "ppo: 20/90 5 s", "ppo: 21/90 1 s", "ppo: 22/90 3 s"
    )
    assert progress.rate == pytest.approx(0.5)


def test_a_stage_says_where_it_resumed_while_it_runs_and_at_its_end(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.apply(StageStarted("ppo"))
    log = tmp_path / ".rlhf" / "logs" / "ppo.log"
    log.parent.mkdir(parents=True)
    log.write_text("ppo: resumed at 4/6\nppo: 5/6 3 s\n")
    state.refresh()
    stage = state.stages["ppo"]
    assert "resumed at 4/6" in describe_stage(stage, 9.0) and stage.progress is not None
    assert "resumed at 4/6" in stage.progress.describe()
    state.apply(StageEnded(StageOutcome("ppo", "ran", 0, 0.0, 9.0)))
    assert "resumed at 4/6" in describe_stage(stage, 9.0)


def test_a_repeated_stage_has_no_progress_until_it_prints_some(tmp_path: Path) -> None:
    """Also for `rlhf status`, which reads all events when the attempt that failed is long over."""
    log = tmp_path / ".rlhf" / "logs" / "ppo.log"
    progress_of(log, "ppo: 10/90 5 s")
    state = RunState(tmp_path)
    state.apply(StageStarted("ppo"))
    state.apply(StageRepeated("ppo", "killed", log.stat().st_size))
    state.refresh()
    assert describe_stage(state.stages["ppo"], 9.0).endswith(", killed")
    with log.open("a") as stream:
        stream.write("ppo: 11/90 1 s\n")
    state.refresh()
    assert describe_stage(state.stages["ppo"], 9.0) == "running 11/90"


def test_what_an_earlier_run_left_in_the_log_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "sft.log"
    log.write_text("sft: 550/550 40 s\n")
    progress = StageProgress(log, log.stat().st_size)
    progress.refresh()
    assert progress.latest is None


GATE = {"passed": True, "conditions": [{"passed": True}]}
LOST = {"passed": False, "mode": "report", "conditions": [{"passed": True}, {"passed": False}]}


MEASURED = {"accuracy": 0.75, "pairs": 20.0, "test_accuracy": 0.5, "test_pairs": 62.0} | {
    "accuracy_length_balanced": 0.9,
    "test_accuracy_length_balanced": 0.612,
    "test_length_balanced_pairs": 50.0,
}


@pytest.mark.parametrize(
    ("stage", "content", "result"),
    [
        ("sft", {"perplexity": 1.5234}, "perplexity 1.52"),
        ("sft", {"perplexity": 1.5, "dropped_over_long": 42.0}, "perplexity 1.5, 42 rows too long"),
        (
            "reward",
            {"accuracy": 0.75, "dropped_over_long": 3.0},
            "validation accuracy 0.750, 3 rows too long",
        ),
        ("reward", MEASURED, "test accuracy 0.500 of 62 pairs, length-balanced 0.612 of 50"),
        (
            "judge",
            {"accuracy": 0.5, "dropped_over_long": 0.0, "pairs": 5.0},
            "validation accuracy 0.500 of 5 pairs",
        ),
        ("gate-sft", GATE, "passed: 1/1"),
        ("gate-policy", LOST, "failed, mode report: 1/2"),
        ("sft", {"other": 1}, ""),
        ("sft", None, ""),
    ],
)
def test_a_finished_stage_is_described_by_its_metrics(
    tmp_path: Path, stage: str, content: dict[str, Any] | None, result: str
) -> None:
    file = tmp_path / RESULTS[stage][0]
    file.parent.mkdir()
    if content is not None:
        file.write_text(json.dumps(content))
    assert describe_result(tmp_path, stage) == result
    assert describe_result(tmp_path, "custom") == ""


def running_state(workspace: Path) -> RunState:
    """Six stages have ended, two run, five wait."""
    state = RunState(workspace)
    state.apply(RunPlanned(STAGES))
    for name in STAGES[:8]:
        state.apply(StageStarted(name, None, 40.0))
    for name in STAGES[:6]:
        state.apply(
            StageEnded(StageOutcome(name, "ran", started=40.0, ended=91.0, work_seconds=50.0))
        )
    progress_of(
        workspace / ".rlhf" / "logs" / f"{STAGES[6]}.log",
        "x: 1/9 5 s",
        "x: 3/9 10 s reward 0.25 kl 1.5",
    )
    state.refresh()
    return state


def drawn(state: RunState, width: int, height: int = 40) -> list[str]:
    """The rows of the table as it is left on a terminal."""
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    table = StageTable(state, console, Stopwatch())
    rows = console.render_lines(table, pad=False)
    return ["".join(segment.text for segment in row).rstrip() for row in rows]


@pytest.mark.parametrize("width", [40, 120])
def test_every_stage_has_one_row_that_fits_the_width(tmp_path: Path, width: int) -> None:
    rows = drawn(running_state(tmp_path), width)
    assert max(map(len, rows)) <= width and len(rows) == len(STAGES) + 1
    assert all(f"stage-{number:02}" in row for number, row in enumerate(rows[:-1]))
    assert "6/13 stages" in rows[-1]


def test_the_row_of_a_running_stage_holds_bar_count_time_left_rate_and_metrics(
    tmp_path: Path,
) -> None:
    (row,) = [row for row in drawn(running_state(tmp_path), 120) if "stage-06" in row]
    assert re.search(r"━+ +3/9  (\d:\d\d left  )?2.5 s each  reward 0.25  kl 1.5", row), row


def test_a_stage_whose_loop_is_over_is_finishing(tmp_path: Path) -> None:
    state = running_state(tmp_path)
    progress_of(tmp_path / ".rlhf" / "logs" / f"{STAGES[6]}.log", "x: 9/9 30 s")
    state.refresh()
    assert any("9/9  finishing" in row for row in drawn(state, 80))


def test_a_repeated_stage_says_why_it_waits(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.apply(RunPlanned(("ppo", "report")))
    state.apply(StageStarted("ppo", "gpu-pool", 40.0))
    state.apply(StageRepeated("ppo", "its job was killed; trying again in 5 s"))
    lines = [describe_stage(stage, now=50.0) for stage in state.stages.values()]
    assert lines == ["running for 0:10, its job was killed; trying again in 5 s", "waiting"]


@pytest.mark.parametrize("own", [True, False])
def test_a_job_of_a_work_pool_is_said_to_run_here_where_this_commands_own_worker_takes_it(
    tmp_path: Path, own: bool
) -> None:
    stream, state = io.StringIO(), RunState(tmp_path)
    state.own_pools = ["gpu-pool"] if own else []
    Display(state, stream).event(StageStarted("ppo", "gpu-pool", 40.0))
    line = describe_stage(state.stages["ppo"], now=50.0)
    for text in (stream.getvalue(), line):
        assert "gpu-pool" in text and ("this machine" in text) == own


def test_the_line_of_a_failed_stage_leaves_a_long_message_to_the_end_of_the_run(
    tmp_path: Path,
) -> None:
    stream, message = (
        io.StringIO(),
        "the data gate failed: " + "preferences.clean is 3, required ≥ 50; " * 9,
    )
    Display(RunState(tmp_path), stream).event(
        StageEnded(StageOutcome.failed("validate", message, 2))
    )
    line = stream.getvalue()
    assert (
        "the data gate failed: preferences.clean is 3" in line
        and line.endswith("…\n")
        and len(line) < 120
    )


def test_plain_lines_tell_what_the_table_shows(tmp_path: Path) -> None:
    state = running_state(tmp_path)
    state.apply(
        StageEnded(StageOutcome.failed(STAGES[7], "no\nmore", 1, started=40.0, ended=100.0))
    )
    lines = [describe_stage(stage, now=100.0) for stage in state.stages.values()]
    assert lines[5] == "ran in 0:51"
    assert lines[6] == "running 3/9, 0:15 left, 2.5 s each, reward 0.25, kl 1.5"
    assert lines[7:9] == ["failed after 1:00, no", "waiting"]


def test_formats() -> None:
    assert [format_seconds(s) for s in (0, 62.4, 3599, 3660, 90000)] == [
        "0:00",
        "1:02",
        "59:59",
        "1h01m",
        "1d01h",
    ]
    assert format_rate(13.96) == "14/s" and format_rate(0.25) == "4 s each"
    assert [format_rate(rate) for rate in (999.7, 6000, 14916, 1e-4)] == [
        "1,000/s",
        "6,000/s",
        "14,916/s",
        "10,000 s each",
    ]
    numbers = format_metrics({"reward": 12345.6, "kl": -1234.0, "lr": 1e-5, "tokens_s": 999950.0})
    assert numbers == ["reward 12,346", "kl -1,234", "lr 1e-05", "1M tokens/s"]
    assert format_metrics({"loss": 0.40971, "tokens_s": 17840.0}) == ["loss 0.41", "17.8k tokens/s"]

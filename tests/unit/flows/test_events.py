"""Events of a run: what the pipeline process writes is what the command reads, once and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.flows.verdicts import VERDICT

from flows.pipeline.events import (
    KINDS,
    EventReader,
    EventWriter,
    PhaseStarted,
    PipelineEvent,
    RegistryUpdated,
    RunEnded,
    RunPlanned,
    StageEnded,
    StagePreempted,
    StageRetried,
    StageStarted,
    VerdictReached,
    new_events_file,
)
from flows.stage.outcome import StageOutcome

EVENTS: list[PipelineEvent] = [
    RunPlanned(["collect", "ppo"]),
    StageStarted("ppo", "gpu-pool", started=1.5, log_start=64),
    StagePreempted("ppo", "preempted, waiting for a worker of gpu-pool"),
    StageRetried("ppo", "its job was killed", 5),
    StageEnded(StageOutcome.failed("ppo", "no: step 3", 4, started=1.0, ended=2.5, work_seconds=1.25)),
    PhaseStarted("promotion", log="match"),
    RegistryUpdated("rlhf-policy version 3"),
    VerdictReached(VERDICT),
    RunEnded("TrainingPaused", "ppo: no: step 3"),
]


def test_every_kind_of_event_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = new_events_file(tmp_path)
    writer, reader = EventWriter(str(path)), EventReader(path)
    for event in EVENTS:
        writer.emit(event)
    assert {type(event) for event in EVENTS} == set(KINDS.values())
    assert reader.read_new() == EVENTS and reader.read_new() == []


def test_half_a_line_is_left_for_the_next_call(tmp_path: Path) -> None:
    path = new_events_file(tmp_path)
    reader = EventReader(path)
    EventWriter(str(path)).emit(StageStarted("sft"))
    line = path.read_text()
    path.write_text(line[:10])
    assert reader.read_new() == []
    path.write_text(line)
    assert reader.read_new() == [StageStarted("sft")]


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_file_nothing_is_written(path: str | None) -> None:
    EventWriter(path).emit(StageStarted("sft"))

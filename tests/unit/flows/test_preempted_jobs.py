"""Preempted jobs: the final state that the job's own process reports, and what the waiting pipeline does."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import Abort, TerminationSignal
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Running, Scheduled, State

from flows.jobs import run_on_pool, stage_job
from flows.jobs.job import Job
from flows.stage.outcome import StageOutcome
from flows.stage.run import StageSpec
from flows.workspace.folder import private_path
from rlhf_core.config.operations import Placement
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED


class Server:
    """Stands in for the server: holds the state of every job, and makes one of ``turns`` at each poll."""

    def __init__(self, workspace: Path, *turns: Turn) -> None:
        self.workspace, self.turns = workspace, list(turns)
        self.states: list[State[Any]] = []
        self.begun: set[int] = set()
        self.attempts: list[str] = []
        self.messages: list[str] = []

    def submit(self, job: Job) -> Any:
        self.states.append(Scheduled())
        self.attempts.append(job.attempt)
        return SimpleNamespace(id=len(self.states) - 1)

    def read_flow_run(self, number: int) -> Any:
        return SimpleNamespace(state=self.states[number], run_count=int(number in self.begun))

    def set_flow_run_state(self, number: int, state: State[Any], force: bool = False) -> None:
        self.states[number] = state
        if state.is_running():
            self.begun.add(number % len(self.states))


Turn = Callable[[Server], None]


def use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def client(sync_client: bool) -> Iterator[Server]:
        yield server

    monkeypatch.setattr(run_on_pool, "get_client", client)
    monkeypatch.setattr(stage_job, "get_client", client)
    monkeypatch.setattr(stage_job, "get_run_logger", lambda: logging.getLogger("job"))
    monkeypatch.setattr(run_on_pool, "submit", server.submit)
    monkeypatch.setattr(run_on_pool, "POLL_SECONDS", 0)


def becomes(state: Callable[[], State[Any]]) -> Turn:
    return lambda server: server.set_flow_run_state(-1, state())


def reports(seconds: float) -> Turn:
    """The stage reports that it was preempted ``seconds`` from now."""

    def report_preemption(server: Server) -> None:
        times = {"started": 0.0, "ended": time.time() + seconds, "seconds": 1.0}
        report = {"stage": "sft", "exit_code": EXIT_PREEMPTED, "message": "saved", **times}
        private_path(server.workspace, "outcomes", "sft.json").write_text(json.dumps(report))

    return report_preemption


def completes(server: Server) -> None:
    StageOutcome.ran("sft", 0.0, 0.0, 0.0).save(server.workspace)
    server.set_flow_run_state(-1, Completed())


def lost() -> State[Any]:
    return stage_job.preempted_state("sft: stopped by a signal")


RUNS, LOST, WAITS = becomes(Running), becomes(lost), [lambda server: None] * run_on_pool.REPORT_POLLS
CRASHES = becomes(lambda: Crashed(message="Flow run process exited with non-zero status code 1."))
PREEMPTED = "preempted, waiting for a worker"
FALSE_START = "its process ended before the job began, waiting for a worker"


@pytest.mark.parametrize(
    ("turns", "exit_code", "says", "messages"),
    [
        pytest.param([RUNS, LOST, RUNS, completes], 0, "", [PREEMPTED], id="preempted"),
        pytest.param([CRASHES, CRASHES, RUNS, completes], 0, "", [FALSE_START] * 2, id="false starts cost no retry"),
        pytest.param([CRASHES] * 3, 1, "with non-zero status code 1.", [FALSE_START] * 2, id="never begins"),
        pytest.param([RUNS, CRASHES], 1, "ended as Crashed", [], id="crashes while it runs"),
        pytest.param(
            [RUNS, reports(-1e6), CRASHES, RUNS, completes], 0, "", [PREEMPTED], id="stage left in good order"
        ),
        pytest.param([RUNS, reports(60), *WAITS, RUNS, completes], 0, "", [PREEMPTED], id="process died unnoticed"),
        pytest.param([RUNS, reports(-60), *WAITS, *WAITS, completes], 0, "", [], id="report from before the job began"),
        pytest.param([LOST] * 3, EXIT_PREEMPTED, "more than 2 times", [PREEMPTED] * 2, id="preempted too often"),
        pytest.param([RUNS, reports(-1e6), becomes(Cancelled)], EXIT_INTERRUPTED, "was cancelled", [], id="cancelled"),
    ],
)
def test_a_job_is_submitted_again_as_long_as_that_may_help(
    turns: list[Turn], exit_code: int, says: str, messages: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(tmp_path, *turns)
    use(server, monkeypatch)
    job = Job(StageSpec(tmp_path, "sft"), Placement(pool="gpu-pool"), "a:1", max_preemptions=2)
    outcome = run_on_pool.run_on_pool(job, lambda: server.turns.pop(0)(server), server.messages.append)
    assert (outcome.exit_code, outcome.ok, outcome.retryable) == (exit_code, exit_code == 0, exit_code == 1)
    assert says in outcome.message and server.messages == messages
    assert server.attempts == ["a:1", "a:1:1", "a:1:2"][: 1 + len(messages)]


def terminated(*_: Any) -> StageOutcome:
    raise TerminationSignal(signal=signal.SIGTERM)


def stopped(*_: Any) -> StageOutcome:
    return StageOutcome.stopped("sft")


def left(*_: Any) -> StageOutcome:
    return StageOutcome.failed("sft", "sft made step 7 of 9", EXIT_PREEMPTED)


@pytest.mark.parametrize("stage", [terminated, stopped, left])
def test_the_job_itself_reports_its_final_state(
    stage: Callable[..., StageOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_job, "run_stage", stage)
    monkeypatch.setattr(stage_job.signals, "install", lambda *_: None)
    monkeypatch.setattr(stage_job, "runtime", SimpleNamespace(flow_run=SimpleNamespace(id=0)))
    server = Server(Path())
    use(server, monkeypatch)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        server.states = [Running()]
        state = stage_job.stage_job.fn("w", "sft", [], {})
        assert state.name == "Preempted" and state.is_crashed()
        assert ("made step 7 of 9" if stage is left else "stopped by a signal") in str(state.message)
        server.states = [Cancelling()]
        assert stage_job.stage_job.fn("w", "sft", [], {}).is_cancelled()
        server.states = [Scheduled()]  # Prefect's supervisor has put it back
        with pytest.raises(Abort):
            stage_job.stage_job.fn("w", "sft", [], {})
    finally:
        signal.signal(signal.SIGTERM, handler)

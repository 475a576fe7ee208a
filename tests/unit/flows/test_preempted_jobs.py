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
from rlhf_core.config.operations import Placement
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED


class Server:
    """Stands in for the server: holds the state of every job, and makes one of ``turns`` at each poll."""

    def __init__(self, *turns: Callable[[Server], None]) -> None:
        self.turns = list(turns)
        self.states: list[State[Any]] = []
        self.begun: set[int] = set()
        self.attempts: list[str] = []
        self.messages: list[str] = []

    def submit(self, job: Job) -> Any:
        self.states.append(Scheduled())
        self.attempts.append(job.attempt)
        parameters = {"workspace": str(job.workspace)}
        return SimpleNamespace(id=len(self.states) - 1, parameters=parameters, state=self.states[-1])

    def read_flow_run(self, number: int) -> Any:
        return SimpleNamespace(state=self.states[number], run_count=int(number in self.begun))

    def set_flow_run_state(self, number: int, state: State[Any], force: bool = False) -> None:
        self.states[number] = state
        if state.is_running():
            self.begun.add(number % len(self.states))

    def turn(self) -> None:
        self.turns.pop(0)(self)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., StageOutcome]:
    """Return a function that runs a job of workspace ``tmp_path`` on a server and returns its outcome."""

    def end(server: Server, preemptions: int = 9) -> StageOutcome:
        use(server, monkeypatch)
        job = Job(StageSpec(tmp_path, "sft"), Placement(pool="gpu-pool"), "a:1", max_preemptions=preemptions)
        return run_on_pool.run_on_pool(job, server.turn, server.messages.append)

    return end


def use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def client(sync_client: bool) -> Iterator[Server]:
        yield server

    monkeypatch.setattr(run_on_pool, "get_client", client)
    monkeypatch.setattr(stage_job, "get_client", client)
    monkeypatch.setattr(stage_job, "get_run_logger", lambda: logging.getLogger("job"))
    monkeypatch.setattr(run_on_pool, "submit", server.submit)
    monkeypatch.setattr(run_on_pool, "POLL_SECONDS", 0)


def becomes(state: Callable[[], State[Any]]) -> Callable[[Server], None]:
    return lambda server: server.set_flow_run_state(-1, state())


def reports(workspace: Path, ended: float) -> Callable[[Server], None]:
    """The stage reports that it was preempted at time ``ended``."""

    def report_preemption(server: Server) -> None:
        (workspace / ".rlhf/outcomes").mkdir(parents=True, exist_ok=True)
        times = {"started": 0.0, "ended": ended, "seconds": 1.0}
        report = {"stage": "sft", "exit_code": EXIT_PREEMPTED, "message": "saved", **times}
        (workspace / ".rlhf/outcomes/sft.json").write_text(json.dumps(report))

    return report_preemption


def completes(workspace: Path) -> Callable[[Server], None]:
    def complete(server: Server) -> None:
        StageOutcome.ran("sft", 0.0, 0.0, 0.0).save(workspace)
        server.set_flow_run_state(-1, Completed())

    return complete


def lost() -> State[Any]:
    return stage_job.preempted_state("sft: stopped by a signal")


def test_a_preempted_job_is_submitted_again_with_a_message(run: Callable[..., StageOutcome], tmp_path: Path) -> None:
    server = Server(becomes(Running), becomes(lost), becomes(Running), completes(tmp_path))
    assert run(server).action == "ran"
    assert server.attempts == ["a:1", "a:1:1"] and server.messages == ["preempted, waiting for a worker"]


def test_a_job_whose_process_ended_before_it_began_costs_no_retry(
    run: Callable[..., StageOutcome], tmp_path: Path
) -> None:
    false_start = becomes(lambda: Crashed(message="Flow run process exited with non-zero status code 1."))
    server = Server(false_start, false_start, becomes(Running), completes(tmp_path))
    assert run(server).action == "ran" and server.attempts == ["a:1", "a:1:1", "a:1:2"]
    assert server.messages == ["its process ended before the job began, waiting for a worker"] * 2


def test_a_job_that_never_begins_or_crashes_while_it_runs_fails(run: Callable[..., StageOutcome]) -> None:
    crash = becomes(lambda: Crashed(message="Flow run process exited with non-zero status code 1."))
    never = Server(crash, crash, crash)
    assert run(never).message.endswith("status code 1.") and len(never.attempts) == 3
    crashed = Server(becomes(Running), crash)
    assert not run(crashed).ok and crashed.attempts == ["a:1"]


def test_a_stage_that_left_in_good_order_while_its_job_died_counts_as_preempted(
    run: Callable[..., StageOutcome], tmp_path: Path
) -> None:
    crashed = [becomes(Running), reports(tmp_path, 0.0), becomes(lambda: Crashed(message="its worker was killed"))]
    server = Server(*crashed, becomes(Running), completes(tmp_path))
    assert run(server).action == "ran" and len(server.messages) == 1


def test_a_job_whose_process_died_unnoticed_is_ended_after_a_while(
    run: Callable[..., StageOutcome], tmp_path: Path
) -> None:
    waiting: list[Callable[[Server], None]] = [lambda server: None] * run_on_pool.REPORT_POLLS
    turns = [becomes(Running), reports(tmp_path, time.time() + 60), *waiting, becomes(Running), completes(tmp_path)]
    server = Server(*turns)
    assert run(server).action == "ran" and len(server.messages) == 1
    assert server.states[0].name == "Preempted"


def test_a_report_from_before_the_job_began_does_not_end_the_job(
    run: Callable[..., StageOutcome], tmp_path: Path
) -> None:
    waiting: list[Callable[[Server], None]] = [lambda server: None] * (2 * run_on_pool.REPORT_POLLS)
    server = Server(becomes(Running), reports(tmp_path, time.time() - 60), *waiting, completes(tmp_path))
    assert run(server).action == "ran" and server.attempts == ["a:1"]


def test_after_so_many_preemptions_the_stage_has_failed(run: Callable[..., StageOutcome]) -> None:
    server = Server(becomes(lost), becomes(lost), becomes(lost))
    outcome = run(server, preemptions=2)
    assert outcome.preempted and not outcome.retryable and "more than 2 times" in outcome.message
    assert len(server.attempts) == 3


def test_a_job_that_is_cancelled_stays_so(run: Callable[..., StageOutcome], tmp_path: Path) -> None:
    outcome = run(Server(becomes(Running), reports(tmp_path, 0.0), becomes(Cancelled)))
    assert outcome.exit_code == EXIT_INTERRUPTED and "cancelled" in outcome.message


def test_a_crash_without_a_report_of_the_stage_is_a_failure(run: Callable[..., StageOutcome]) -> None:
    outcome = run(Server(becomes(Running), becomes(lambda: Crashed(message="killed"))))
    assert outcome.retryable and not outcome.preempted


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
    server = Server()
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

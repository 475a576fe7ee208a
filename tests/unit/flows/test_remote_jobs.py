"""Jobs of a pool: what travels to hosts without the workspace, a log that loses no line, and
preemptions.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import Abort, ObjectNotFound, TerminationSignal
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Running, Scheduled, State
from unit.flows.test_retry_and_clock import FakeClock

from flows.jobs import run_on_pool, stage_job, transfer
from flows.jobs.job import Handoff, Job
from flows.jobs.remote import (
    CARRIED_BYTES,
    _untracked_inputs,
    check_remote_stages,
    code_difference,
    read_carried_files,
    rebuild_workspace,
)
from flows.jobs.transfer import LogFollower, LogShipper, TransferFailed, describe_remote
from flows.prefect_server import flow_runs
from flows.stage import StageOutcome, StageSpec
from flows.supervision.processes import CommandResult, LogReader
from flows.workspace import private_path
from rlhf_core.config.loading import load_params
from rlhf_core.config.operations import Placement
from rlhf_core.errors import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    ConfigError,
    RlhfError,
)
from rlhf_core.fingerprint.stages import fingerprint
from rlhf_core.fingerprint.tracked_files import write_tracked_files

RUN = UUID(int=7)


def handoff(remote: str = "/remote", **files: str) -> Handoff:
    return Handoff("ppo-1", {"name": "store", "url": remote}, (), files, "none", 300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "no DVC remote is set"),
        ({"url": "ssh://me:secret@host/cache"}, "holds a password"),
        ({"url": "https://host/cache"}, "keeps no run cache"),
        ({"url": "s3://bucket/cache", "version_aware": "true"}, "keeps no run cache"),
    ],
)
def test_a_remote_that_serves_no_two_hosts_is_refused(
    tmp_path: Path, options: dict[str, str], complaint: str
) -> None:
    lines = [
        "[core]\n  no_scm = True\n  remote = store\n" if options else "[core]\n  no_scm = True\n"
    ]
    lines += [
        "['remote \"store\"']\n" if options else "",
        *(f"  {key} = {value}\n" for key, value in options.items()),
    ]
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("".join(lines))
    with pytest.raises(RlhfError, match=complaint) as refusal:
        describe_remote(tmp_path, None)
    assert refusal.value.exit_code == EXIT_USER_ERROR
    assert "secret" not in str(refusal.value)


READS_OUTSIDE = """
stages:
  sft: {{cmd: echo > model, deps: [raw], outs: [model]}}
  evaluate: {{cmd: echo > out, deps: {deps}, outs: [{out}]}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deps", "out", "launch", "complaint"),
    [
        (
            "[model, ../checks.jsonl]",
            "out",
            "{}",
            "evaluate reads ../checks.jsonl, which is outside the workspace",
        ),
        (
            "[model, picture]",
            "out",
            "{}",
            "picture is an input that DVC does not cache, and it is not text",
        ),
        ("[model]", "out: {cache: false}", "{}", "DVC's run cache does not take this stage"),
        (
            "[model]",
            "out",
            "{sft: {engine: deepspeed, deepspeed: ../ds.json}}",
            "sft reads ../ds.json, which",
        ),
        ("[model]", "out", "{}", ""),
    ],
)
def test_a_stage_that_cannot_travel_is_refused_before_the_stages_before_it_run(
    tmp_path: Path, deps: str, out: str, launch: str, complaint: str
) -> None:
    workspace = tmp_path / "ws"
    workspace.mkdir()
    away = "{pool: far, shared: false}"
    params = f"pools: {{sft: {away}, evaluate: {away}}}\ncompute: {{launch: {launch}}}\n"
    (workspace / "params.yaml").write_text(params)
    (workspace / "dvc.yaml").write_text(READS_OUTSIDE.format(deps=deps, out=out))
    for name in ("raw", "../checks.jsonl", "../ds.json"):
        (workspace / name).write_text("{}")
    (workspace / "picture").write_bytes(b"\xff\xfe")
    rebuild_workspace(workspace, handoff(), tmp_path / "cache")
    if not complaint:
        check_remote_stages(workspace, load_params(workspace))
        return
    with pytest.raises(ConfigError, match=complaint):
        check_remote_stages(workspace, load_params(workspace))


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize("most", [14, 20, 40, 1000])
def test_a_log_in_pieces_loses_no_letter(tmp_path: Path, most: int, unfinished: bool) -> None:
    log = tmp_path / "ppo.log"
    log.write_text("中文日志\n" * 10 + "no end yet")
    reader, pieces = LogReader(log, 0), []
    while piece := reader.lines(most, unfinished):
        assert len(piece) <= most
        pieces.append(piece.decode())
        reader.start += len(piece)
    assert "".join(pieces) == "中文日志\n" * 10 + ("no end yet" if unfinished else "")


def test_secrets_of_a_remote_stay_on_their_host(tmp_path: Path) -> None:
    rebuild_workspace(tmp_path, handoff("s3://bucket/cache"), tmp_path / "cache")
    with (tmp_path / ".dvc" / "config.local").open("w") as file:
        file.write("['remote \"store\"']\n  secret_access_key = hush\n  region = north\n")
    public = describe_remote(tmp_path, None)
    assert public == {"name": "store", "url": "s3://bucket/cache", "region": "north"}


def test_a_submission_writes_nothing_outside_the_workspace_it_rebuilds(tmp_path: Path) -> None:
    for path in ("../elsewhere", "/elsewhere", "a/../../b"):
        with pytest.raises(ValueError, match="outside the workspace"):
            rebuild_workspace(tmp_path / "job", handoff(**{path: "x"}), tmp_path / "cache")
    assert not (tmp_path / "job").exists()


@pytest.mark.slow
def test_a_host_with_other_code_names_the_difference(tmp_path: Path) -> None:
    same = {
        "params.yaml": "seed: 1\n",
        "dvc.yaml": "stages: {}\n",
        ".fingerprints/sft.txt": fingerprint("sft") + "\n",
    }
    rebuild_workspace(tmp_path / "same", handoff(**same), tmp_path / "cache")
    assert code_difference(tmp_path / "same", handoff(**same)) == ""
    other = {**same, ".fingerprints/ppo.txt": "0" * 64 + "\n"}
    rebuild_workspace(tmp_path / "other", handoff(**other), tmp_path / "cache")
    difference = code_difference(tmp_path / "other", handoff(**other))
    assert "differ from the pipeline's" in difference and ".fingerprints/ppo.txt" in difference
    assert "sft.txt" not in difference and "\n" not in difference


@pytest.mark.slow
def test_a_reward_function_travels_with_the_job(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    source = "ppo: {reward: {sources: [{kind: function, target: 'own_rewards:score'}]}}\n"
    (here / "params.yaml").write_text(source)
    (here / "dvc.yaml").write_text("stages: {}\n")
    (here / "own_rewards.py").write_text(
        "import own_vocabulary\n\ndef score(prompts, replies):\n    return [1.0]\n"
    )
    (here / "own_vocabulary.py").write_text("GOOD = ['please']\n")
    (here / "unrelated.py").write_text("pass\n")
    write_tracked_files(here, load_params(here).ppo)
    carried = read_carried_files(
        here, ["params.yaml", "dvc.yaml", ".fingerprints", *_untracked_inputs(here, "ppo")]
    )
    assert {path for path in carried if path.endswith(".py")} == {
        "own_rewards.py",
        "own_vocabulary.py",
    }
    assert _untracked_inputs(here, "sft") == []
    rebuild_workspace(there, handoff(**carried), tmp_path / "cache")
    assert code_difference(there, handoff(**carried)) == ""
    (there / "own_vocabulary.py").write_text("GOOD = ['thanks']\n")
    assert "reward_sources.txt" in code_difference(there, handoff(**carried))


def test_small_text_travels_with_the_job_and_the_rest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.py").write_text("pass\n")
    assert read_carried_files(tmp_path, ["scripts", "dvc.lock"]) == {"scripts/a.py": "pass\n"}
    (tmp_path / "table").write_bytes(b"\xff\xfe")
    with pytest.raises(
        RlhfError, match="table is an input that DVC does not cache, and it is not text"
    ):
        read_carried_files(tmp_path, ["table"])
    (tmp_path / "large").write_text("x" * (CARRIED_BYTES + 1))
    with pytest.raises(RlhfError, match="the largest is large"):
        read_carried_files(tmp_path, ["scripts", "large"])


def test_a_transfer_is_tried_again_while_the_remote_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def unreachable(command: list[str], **_: Any) -> Any:
        calls.append(command[-2])
        return SimpleNamespace(result=lambda: CommandResult(1, "ERROR: no route to host\n"))

    monkeypatch.setattr(transfer, "start_supervised", unreachable)
    clock = FakeClock(monkeypatch)
    reported: list[str] = []
    with pytest.raises(TransferFailed):
        transfer.dvc_transfer(tmp_path, ("push", "ppo"), 20, reported.append)
    assert calls == ["push"] * 4 and clock.pauses == [2, 4, 8]
    assert reported[0] == "no route to host; trying again in 2 s"


@dataclass
class Record:
    id: UUID
    name: str
    message: str
    timestamp: Any


class LogServer:
    """Keeps log records; refuses every other call, and mixes in records of another logger."""

    def __init__(self) -> None:
        self.kept: list[Record] = []
        self.calls = 0

    def create_logs(self, logs: Any) -> None:
        self.calls += 1
        if self.calls % 2:
            raise OSError("unreachable")
        for log in logs:
            self.kept.append(Record(uuid4(), "prefect.flow_runs", "not the stage's", log.timestamp))
            self.kept.append(Record(uuid4(), log.name, log.message, log.timestamp))

    def read_logs(self, wanted: Any, limit: int, offset: int, sort: Any) -> list[Record]:
        since = wanted.timestamp.after_ if wanted.timestamp else None
        logs = [log for log in self.kept if since is None or log.timestamp >= since]
        return logs[offset : offset + limit]


def test_each_line_of_the_log_arrives_once_over_refused_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LogServer()

    @contextmanager
    def get_client(sync_client: bool) -> Iterator[LogServer]:
        yield server

    monkeypatch.setattr(transfer, "get_client", get_client)
    monkeypatch.setattr(transfer, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 64)
    there, here = tmp_path / "there.log", tmp_path / "here.log"
    there.write_text("of an earlier attempt\n")
    follower, client = LogFollower(here), cast(SyncPrefectClient, server)
    lines = [f"ppo: {number}/100\n" for number in range(100)]
    with LogShipper(there, RUN), there.open("a") as log:
        for line in lines:
            log.write(line)
            log.flush()
            follower.fetch(client, RUN, now=True)
        log.write("the last one has no end")
    follower.fetch(client, RUN, now=True)
    assert here.read_text() == "".join(lines) + "the last one has no end"


class Server:
    """Stands in for the server: holds the state of every job, and makes one of ``turns`` at each
    poll.
    """

    def __init__(self, workspace: Path, *turns: Turn) -> None:
        self.workspace, self.turns = workspace, list(turns)
        self.states: list[State[Any]] = []
        self.begun: set[int] = set()
        self.attempts: list[str] = []
        self.messages: list[str] = []
        self.command: str | None = None

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
    monkeypatch.setattr(flow_runs, "get_client", client)
    monkeypatch.setattr(stage_job, "get_run_logger", lambda: logging.getLogger("job"))
    monkeypatch.setattr(run_on_pool, "submit", server.submit)
    monkeypatch.setattr(run_on_pool, "missing_worker", lambda pool: server.command)


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
    StageOutcome("sft", "ran", started=0.0, ended=0.0, work_seconds=0.0).save(server.workspace)
    server.set_flow_run_state(-1, Completed())


def lost() -> State[Any]:
    return stage_job.preempted_state("sft: stopped by a signal")


RUNS, LOST, WAITS = (
    becomes(Running),
    becomes(lost),
    [lambda server: None] * run_on_pool.REPORT_POLLS,
)
CRASHES = becomes(lambda: Crashed(message="Flow run process exited with non-zero status code 1."))
PREEMPTED = "preempted, waiting for a worker of gpu-pool"
QUEUED, TAKEN = "no worker is free, waiting for one of gpu-pool", "taken by a worker of gpu-pool"
FALSE_START = "its process ended before the job began, waiting for a worker of gpu-pool"
NONE_ONLINE = f"{QUEUED}; none is online, and `prefect worker start` starts one"
HALF_AN_HOUR = [lambda server: None] * 3600


@pytest.mark.parametrize(
    ("turns", "exit_code", "says", "messages"),
    [
        pytest.param([RUNS, LOST, RUNS, completes], 0, "", [PREEMPTED], id="preempted"),
        pytest.param(
            [*WAITS * 9, RUNS, *WAITS, completes], 0, "", [QUEUED, TAKEN], id="queued, then taken"
        ),
        pytest.param(
            [CRASHES, CRASHES, RUNS, completes],
            0,
            "",
            [FALSE_START] * 2,
            id="false starts cost no retry",
        ),
        pytest.param(
            [CRASHES] * 3, 1, "with non-zero status code 1.", [FALSE_START] * 2, id="never begins"
        ),
        pytest.param([RUNS, CRASHES], 1, "ended as Crashed", [], id="crashes while it runs"),
        pytest.param(
            [RUNS, reports(-1e6), CRASHES, RUNS, completes],
            0,
            "",
            [PREEMPTED],
            id="stage left in order",
        ),
        pytest.param(
            [RUNS, reports(60), *WAITS, RUNS, completes],
            0,
            "",
            [PREEMPTED],
            id="process died unnoticed",
        ),
        pytest.param(
            [RUNS, reports(-60), *WAITS, *WAITS, completes],
            0,
            "",
            [],
            id="report from before the job began",
        ),
        pytest.param(
            [LOST] * 3,
            EXIT_PREEMPTED,
            "more than 2 times",
            [PREEMPTED] * 2,
            id="preempted too often",
        ),
        pytest.param(
            [RUNS, reports(-1e6), becomes(Cancelled)],
            EXIT_INTERRUPTED,
            "was cancelled",
            [],
            id="cancelled",
        ),
    ],
)
def test_a_job_is_submitted_again_as_long_as_that_may_help(
    turns: list[Turn],
    exit_code: int,
    says: str,
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, *turns)
    use(server, monkeypatch)
    job = Job(StageSpec(tmp_path, "sft"), Placement(pool="gpu-pool"), "a:1", max_preemptions=2)
    stop = SimpleNamespace(is_set=lambda: False, wait=lambda _: server.turns.pop(0)(server))
    monkeypatch.setattr(run_on_pool.signals, "STOP", stop)
    outcome = run_on_pool.run_on_pool(job, server.messages.append)
    assert (outcome.exit_code, outcome.ok, outcome.retryable) == (
        exit_code,
        exit_code == 0,
        exit_code == 1,
    )
    assert says in outcome.message and server.messages == messages
    repeats = sum(message not in (QUEUED, TAKEN) for message in messages)
    assert server.attempts == ["a:1", "a:1:1", "a:1:2"][: 1 + repeats]


def test_a_wait_names_the_missing_worker_and_is_told_again_every_ten_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(tmp_path, *HALF_AN_HOUR, RUNS, completes)
    server.command = "prefect worker start"
    use(server, monkeypatch)
    stop = SimpleNamespace(is_set=lambda: False, wait=lambda _: server.turns.pop(0)(server))
    monkeypatch.setattr(run_on_pool.signals, "STOP", stop)
    job = Job(StageSpec(tmp_path, "sft"), Placement(pool="gpu-pool"), "a:1")
    assert run_on_pool.run_on_pool(job, server.messages.append).ok
    assert server.messages == [*[NONE_ONLINE] * 3, TAKEN]


def terminated(*_: Any) -> StageOutcome:
    raise TerminationSignal(signal=signal.SIGTERM)


def stopped(*_: Any) -> StageOutcome:
    return StageOutcome.stopped("sft")


def left(*_: Any) -> StageOutcome:
    return StageOutcome.failed("sft", "sft made step 7 of 9", EXIT_PREEMPTED)


@pytest.mark.parametrize("stage", [terminated, stopped, left])
def test_the_job_itself_reports_its_final_state(
    stage: Callable[..., StageOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = str(tmp_path / "w")
    monkeypatch.setattr(stage_job, "run_stage", stage)
    monkeypatch.setattr(stage_job.signals, "install", lambda *_: None)
    monkeypatch.setattr(stage_job, "runtime", SimpleNamespace(flow_run=SimpleNamespace(id=0)))
    server = Server(Path())
    use(server, monkeypatch)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        server.states = [Running()]
        state = stage_job.stage_job.fn(workspace, "sft", [], {})
        assert state.name == "Preempted" and state.is_crashed()
        assert ("made step 7 of 9" if stage is left else "stopped by a signal") in str(
            state.message
        )
        server.states = [Cancelling()]
        assert stage_job.stage_job.fn(workspace, "sft", [], {}).is_cancelled()
        server.states = [Scheduled()]  # Prefect's supervisor has put it back
        with pytest.raises(Abort):
            stage_job.stage_job.fn(workspace, "sft", [], {})
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(httpx.ConnectError("All connection attempts failed"), id="away"),
        pytest.param(ObjectNotFound(KeyError("404 Not Found")), id="deleted"),
    ],
)
def test_a_job_keeps_watching_for_its_cancellation_whatever_the_server_answers(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process worker tells no job of it after half a minute without the server.

    A run may be deleted and its database restored while its stage works.
    """

    class LateServer(Server):
        def read_flow_run(self, number: int) -> Any:
            if self.turns:
                self.turns.pop()(self)
            return super().read_flow_run(number)

    def has_no_answer(server: Server) -> None:
        raise error

    def works(spec: StageSpec) -> StageOutcome:
        return stopped() if stage_job.signals.STOP.wait(60) else left()

    monkeypatch.setattr(stage_job, "run_stage", works)
    monkeypatch.setattr(flow_runs, "WATCH_SECONDS", 0.001)
    monkeypatch.setattr(stage_job.signals, "install", lambda *_: None)
    monkeypatch.setattr(stage_job.signals, "STOP", threading.Event())
    for module in (stage_job, flow_runs):
        monkeypatch.setattr(module, "runtime", SimpleNamespace(flow_run=SimpleNamespace(id=0)))
    server = LateServer(Path(), becomes(Cancelling), *[has_no_answer] * 9)
    server.states = [Running()]
    use(server, monkeypatch)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert stage_job.stage_job.fn(str(tmp_path / "w"), "sft", [], {}).is_cancelled()
    finally:
        signal.signal(signal.SIGTERM, handler)

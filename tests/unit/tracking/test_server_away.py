"""An MLflow server that goes away during a stage: records wait on disk, arrive later, and nothing stops."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from requests import HTTPError, Response
from unit.tracking.conftest import AWAY, URI, Clock, Server

from rlhf_core.errors import ConfigError
from rlhf_core.tracking.delivery import ServerAway, address, away_errors, deliver_waiting
from rlhf_core.tracking.journal import Journal, RunHeader, waiting_records
from rlhf_core.tracking.stage_run import JournalTracker


def new_tracker(server: Server, workspace: Path, clock: Clock | None = None) -> JournalTracker:
    header = RunHeader(address(URI), None, "rlhf", {"stage": "sft"}, 1000)
    return JournalTracker(Journal.new(workspace, header), server, lambda: "7", clock or Clock())


def test_while_the_server_answers_nothing_is_left(server: Server, tmp_path: Path) -> None:
    tracker = new_tracker(server, tmp_path)
    assert tracker.begin()
    tracker.log_metrics({"loss": 1.0, "bad": float("nan")}, 3)
    tracker.log_params({"lr": 0.1})
    tracker.set_tags({"one": "1", "two": "2"})
    tracker.end("FINISHED")
    assert server.calls == [
        ("create", ("7", 1000, "sft")),
        ("batch", [("loss", 1.0, 3)]),
        ("batch", [("lr", "0.1")]),
        ("batch", [("one", "1"), ("two", "2")]),
        ("end", "FINISHED"),
    ]
    assert waiting_records(tmp_path) == 0 and not list((tmp_path / ".rlhf/tracking").iterdir())


def test_records_wait_and_arrive_in_order_in_few_requests(
    server: Server, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = new_tracker(server, tmp_path, clock)
    tracker.begin()
    plot = tmp_path / "plot.txt"
    server.error = AWAY
    for step in range(1, 1101):
        tracker.log_metrics({"loss": float(step)}, step)
    plot.write_text("as it was")
    tracker.log_artifact(plot, "plots")
    plot.write_text("overwritten since")
    assert server.attempts == 2 and waiting_records(tmp_path) == 1101  # that of the run, and that of step 1
    server.error, server.calls, clock.now = None, [], 2.0
    tracker.log_metrics({"loss": 0.5}, 1101)
    names = [name for name, _ in server.calls]
    assert names == ["batch", "batch", "artifact", "batch"] and waiting_records(tmp_path) == 0
    clock.now = 3.0
    assert len(server.calls[0][1]) == 1000 and server.calls[1][1][-1] == ("loss", 1100.0, 1100)
    assert server.calls[2][1] == ("plot.txt", "as it was", "plots")
    tracker.log_metrics({"loss": 0.4}, 1102)
    assert server.calls[-1][1] == [("loss", 0.4, 1102)]
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "http://127.0.0.1:5000 is away" in messages[0] and "the stage goes on" in messages[0]
    assert messages[1] == "MLflow at http://127.0.0.1:5000 answers again; 1102 records were delivered"


@pytest.mark.slow
def test_a_server_that_lets_requests_hang_costs_a_fifth_of_the_time_at_most(
    server: Server, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = new_tracker(server, tmp_path, clock)
    tracker.begin()
    waited = 0.0

    def hang(*_: Any, **__: Any) -> None:
        nonlocal waited
        clock.now += 20.0
        waited += 20.0
        raise AWAY

    monkeypatch.setattr(server, "log_batch", hang)
    while clock.now < 3600:
        tracker.log_metrics({"loss": 1.0}, 1)
        clock.now += 1.0
    assert 0 < waited <= 3600 / 5 + 20


def test_a_run_that_begins_and_ends_without_its_server_is_delivered_by_the_next(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.error = AWAY
    tracker = new_tracker(server, tmp_path)
    assert not tracker.begin()
    tracker.log_metrics({"loss": 1.0}, 1)
    tracker.end("FINISHED")
    assert "2 records wait in" in caplog.records[-1].message
    server.error = None
    assert deliver_waiting(server, lambda: "7", tmp_path, URI) == 2
    assert server.calls == [("create", ("7", 1000, "sft")), ("batch", [("loss", 1.0, 1)]), ("end", "FINISHED")]
    assert deliver_waiting(server, lambda: "7", tmp_path, URI) == 0 and waiting_records(tmp_path) == 0


def test_records_of_a_stage_that_still_runs_or_of_another_server_are_left(server: Server, tmp_path: Path) -> None:
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    server.error = AWAY
    tracker.log_metrics({"loss": 1.0}, 1)
    server.error, server.calls = None, []
    assert deliver_waiting(server, lambda: "7", tmp_path, URI) == 0
    tracker.journal.release()
    assert deliver_waiting(server, lambda: "7", tmp_path, "http://127.0.0.1:6000") == 0
    assert server.calls == [] and deliver_waiting(server, lambda: "7", tmp_path, URI) == 1


def test_a_killed_stage_leaves_what_it_had_written(server: Server, tmp_path: Path) -> None:
    server.error = AWAY
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    tracker.log_metrics({"loss": 1.0}, 1)
    with (tracker.journal.folder / "records.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "metrics"})[:9])  # killed while it wrote
    tracker.journal.release()  # the kernel does
    server.error = None
    assert deliver_waiting(server, lambda: "7", tmp_path, URI) == 1
    assert server.calls[-2:] == [("batch", [("loss", 1.0, 1)]), ("end", "FAILED")]


def test_no_name_or_password_is_written(server: Server, tmp_path: Path) -> None:
    server.error = AWAY
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    tracker.log_params({"lr": 1})
    written = [path.read_text() for path in (tmp_path / ".rlhf").rglob("*") if path.is_file()]
    assert len(written) == 3 and not any("secret" in text for text in written)


def refused(status: int) -> HTTPError:
    response = Response()
    response.status_code = status
    return HTTPError("no", response=response)


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (AWAY, True),
        (refused(503), True),
        (refused(429), True),
        (refused(401), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (refused(413), False),
        (MlflowException("changed", INVALID_PARAMETER_VALUE), False),
    ],
)
def test_only_what_may_go_away_by_itself_makes_records_wait(error: Exception, waits: bool) -> None:
    with pytest.raises(ServerAway if waits else type(error)), away_errors():
        raise error


@pytest.mark.parametrize("refusal", [refused(413), MlflowException("changed", INVALID_PARAMETER_VALUE)])
def test_a_refused_record_is_a_warning(
    refusal: Exception, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    server.error = refusal
    tracker.log_params({"lr": 1})
    assert "MLflow refused records of run run: " in caplog.text and waiting_records(tmp_path) == 0


def test_a_login_that_is_not_accepted_is_one_line_at_the_start(server: Server, tmp_path: Path) -> None:
    server.error = refused(401)
    with pytest.raises(ConfigError, match=r"does not accept the login .*MLFLOW_TRACKING_USERNAME"):
        new_tracker(server, tmp_path).begin()

"""A stage whose MLflow server is killed and comes back: training goes on, and every record
arrives.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background import wait_until
from servers.conftest import Servers

from flows.pipeline.record import delivered_records
from flows.registry.client import connect, prepare_tracking
from rlhf_core.tracking.journal import waiting_records
from rlhf_core.tracking.stage_run import Tracker, stage_tracker

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]


@pytest.fixture
def toy(
    tmp_path: Path, servers: Servers, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A workspace that records on the server, which is up again at the end."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    (tmp_path / "params.yaml").write_text("seed: 1\ntracking: {experiment: away}\n")
    prepare_tracking(tmp_path)
    yield tmp_path
    servers.call("up", "mlflow")


def losses(workspace: Path, run_id: str) -> list[tuple[int, float]]:
    return [
        (metric.step, metric.value)
        for metric in connect(workspace).get_metric_history(run_id, "train/loss")
    ]


def newest_run(workspace: Path) -> str:
    client = connect(workspace)
    experiment = client.get_experiment_by_name("away")
    runs = client.search_runs(
        [experiment.experiment_id], order_by=["attributes.start_time DESC"], max_results=1
    )
    return str(runs[0].info.run_id)


def test_a_stage_outlives_its_server(
    toy: Path, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    plot = toy / "plot.svg"
    with (
        caplog.at_level(logging.WARNING, "rlhf_core"),
        stage_tracker("sft", toy, "away") as tracker,
    ):
        tracker.log_params({"lr": 0.1})
        tracker.log_metrics({"loss": 3.0}, 1)
        servers.call("kill", "mlflow")
        step = log_until(lambda: "is away" in caplog.text, tracker, 2)
        began = time.monotonic()
        for later in range(step, step + 500):
            tracker.log_metrics({"loss": 3.0 / later}, later)
        plot.write_text("<svg/>")
        tracker.log_artifact(plot, "plots")
        plot.unlink()
        assert waiting_records(toy) > 500 and time.monotonic() - began < 60
        servers.call("up", "mlflow")
        step = log_until(lambda: not waiting_records(toy), tracker, step + 500)
    run_id = newest_run(toy)
    assert losses(toy, run_id) == [(n, 3.0 / n) for n in range(1, step)], "each once and in order"
    run = connect(toy).get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
    assert [artifact.path for artifact in connect(toy).list_artifacts(run_id, "plots")] == [
        "plots/plot.svg"
    ]
    assert "is away" in caplog.text and "answers again" in caplog.text


def test_what_a_stage_could_not_deliver_is_delivered_by_the_next_command(
    toy: Path, servers: Servers
) -> None:
    servers.call("kill", "mlflow")
    with stage_tracker("sft", toy, "away") as tracker:
        tracker.log_metrics({"loss": 1.0}, 1)
    assert waiting_records(toy) == 2
    moved = toy.parent / "moved"
    shutil.copytree(toy, moved)  # the folder may be elsewhere by then
    servers.call("up", "mlflow")
    prepare_tracking(moved)
    assert waiting_records(moved) == 0
    run_id = newest_run(moved)
    assert (
        losses(moved, run_id) == [(1, 1.0)]
        and connect(moved).get_run(run_id).info.status == "FINISHED"
    )


def test_a_run_delivers_what_its_stage_recorded_while_the_server_was_away(
    toy: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with delivered_records(toy, True) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with stage_tracker("sft", toy, "away") as tracker:
            tracker.log_metrics({"loss": 3.0}, 1)
            wait_until(lambda: not waiting_records(toy), 300, "delivery")
            servers.call("kill", "mlflow")
            for step in range(2, 500):
                tracker.log_metrics({"loss": 3.0 / step}, step)
            while "mlflow: up" in servers.call("status"):
                time.sleep(0.1)
            servers.call("up", "mlflow")
            wait_until(lambda: not waiting_records(toy), 300, "delivery")
            tracker.log_metrics({"loss": 3.0 / 500}, 500)
    run_id = newest_run(toy)
    assert losses(toy, run_id) == [(n, 3.0 / n) for n in range(1, 501)], "each once and in order"
    assert connect(toy).get_run(run_id).info.status == "FINISHED" and waiting_records(toy) == 0


def log_until(happened: Callable[[], bool], tracker: Tracker, step: int) -> int:
    """Log the loss twice a second, as a training does, until something has happened; returns the
    next step.
    """
    deadline = time.monotonic() + 300
    while not happened() and time.monotonic() < deadline:
        tracker.log_metrics({"loss": 3.0 / step}, step)
        step += 1
        time.sleep(0.5)
    return step

"""Stages that run in processes of their own, and the pipeline's process that delivers their records
to MLflow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline.record import delivered_records, without_delivery
from flows.registry.client import connect, prepare_tracking
from rlhf_core.tracking.journal import waiting_records
from rlhf_core.tracking.stage_run import PARENT_RUN_VARIABLE

STAGE = """
import sys, time
from pathlib import Path
from rlhf_core.tracking.stage_run import stage_tracker
workspace = Path(sys.argv[2])
with stage_tracker(sys.argv[1], workspace, "records") as tracker:
    tracker.log_params({"lr": 0.1})
    for step in range(1, 301):
        tracker.log_metrics({"loss": 1 / step, "reward": float(step)}, step)
    plot = workspace / f"{sys.argv[1]}.svg"
    plot.write_text("<svg/>")
    tracker.log_artifact(plot, "plots")
    plot.unlink()
    print("recorded", flush=True)
    if sys.stdin.readline().strip() == "fail":
        raise SystemExit(3)
print("mlflow" in sys.modules)
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("RLHF_TRACKING", raising=False)
    (tmp_path / "params.yaml").write_text("seed: 1\ntracking: {experiment: records}\n")
    prepare_tracking(tmp_path)
    return tmp_path


def start_stage(name: str, workspace: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """A stage that has recorded all but its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", STAGE, name, str(workspace)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **variables},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "recorded\n"
    return process


def runs(workspace: Path) -> dict[str, Any]:
    """All runs by their stage, each once."""
    client = connect(workspace)
    experiment = client.get_experiment_by_name("records")
    assert experiment is not None
    listed = client.search_runs([experiment.experiment_id])
    by_stage = {run.data.tags["rlhf.stage"]: run for run in listed}
    assert len(by_stage) == len(listed)
    return by_stage


@pytest.mark.slow
def test_stages_record_side_by_side_and_never_load_mlflow(workspace: Path) -> None:
    with delivered_records(workspace, True) as variables:
        variables = {**variables, PARENT_RUN_VARIABLE: "the pipeline"}
        stages = {
            name: start_stage(name, workspace, variables) for name in ("reward", "judge", "referee")
        }
        stages["judge"].communicate("fail\n")
        stages["referee"].send_signal(signal.SIGKILL)
        stages["referee"].communicate()
        output, _ = stages["reward"].communicate("\n")
        assert output == "False\n"
    by_stage = runs(workspace)
    assert {name: run.info.status for name, run in by_stage.items()} == {
        "reward": "FINISHED", "judge": "FAILED", "referee": "FAILED",
    }  # fmt: skip
    client = connect(workspace)
    for run in by_stage.values():
        assert run.data.tags["mlflow.parentRunId"] == "the pipeline" and run.data.params == {
            "lr": "0.1"
        }
        history = client.get_metric_history(run.info.run_id, "train/reward")
        assert [(metric.step, metric.value) for metric in history] == [
            (step, float(step)) for step in range(1, 301)
        ]
        assert [file.path for file in client.list_artifacts(run.info.run_id, "plots")] != []
    assert (
        waiting_records(workspace) == 0 and list((workspace / ".rlhf" / "tracking").iterdir()) == []
    )


@pytest.mark.slow
def test_what_a_killed_pipeline_left_is_delivered_by_the_next_once(workspace: Path) -> None:
    pipeline = (
        "import os, signal, sys; from pathlib import Path\n"
        "from flows.pipeline.record import delivered_records\n"
        "with delivered_records(Path(sys.argv[1]), True):\n"
        "    print('delivers', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    courier = subprocess.Popen(
        [sys.executable, "-c", pipeline, str(workspace)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert courier.stdout is not None and courier.stdout.readline() == "delivers\n"
    stage = start_stage("sft", workspace, {"RLHF_TRACKING_DEFERRED": "1"})
    while "sft" not in runs(workspace):  # until some of it has arrived
        pass
    courier.send_signal(signal.SIGKILL)
    courier.communicate()
    stage.communicate("\n")
    assert waiting_records(workspace) > 0
    prepare_tracking(workspace)
    run = runs(workspace)["sft"]
    assert run.info.status == "FINISHED" and waiting_records(workspace) == 0
    history = connect(workspace).get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [
        (step, 1 / step) for step in range(1, 301)
    ]


def test_nothing_is_delivered_for_a_pipeline_that_is_not_tracked(tmp_path: Path) -> None:
    with delivered_records(tmp_path, False) as variables:
        assert variables == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_stage_that_does_not_share_the_workspace_delivers_by_itself(workspace: Path) -> None:
    with delivered_records(workspace, True) as variables:
        environment = {**variables, PARENT_RUN_VARIABLE: "the pipeline"}
    assert without_delivery(environment) == {PARENT_RUN_VARIABLE: "the pipeline"} != environment

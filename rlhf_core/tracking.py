"""The record of what happened: MLflow runs behind a small protocol. The only module of the core that knows MLflow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.errors import Preempted
from rlhf_core.files import LockFile
from rlhf_core.garbage_collection import paused_collector
from rlhf_core.preemption import StopNow

PARENT_RUN_VARIABLE = "RLHF_PARENT_RUN_ID"


class Tracker(Protocol):
    """Where a stage sends its metrics, parameters and files.

    Attributes:
        run_id: MLflow's id of the run, empty where there is none.
    """

    run_id: str

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record finite numbers, optionally at a step; non-finite ones are left out."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record settings of the run."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file into the run's artifacts."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Label the run."""


class NullTracker:
    """Discards everything: for library use and for runs with tracking switched off."""

    run_id = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Discard."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Discard."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Discard."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Discard."""


class MlflowTracker:
    """One MLflow run, written through a client so that no global state of MLflow is touched."""

    def __init__(self, client: Any, run_id: str) -> None:
        self.client, self.run_id = client, run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        finite = [(k, float(v)) for k, v in metrics.items() if math.isfinite(float(v))]
        self.client.log_batch(self.run_id, metrics=[Metric(k, v, now, step or 0) for k, v in finite])

    def log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        rows = [Param(key, str(value)[:500]) for key, value in params.items()]
        for start in range(0, len(rows), 100):
            self.client.log_batch(self.run_id, params=rows[start : start + 100])

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self.client.log_artifact(self.run_id, str(path), folder)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_tag(self.run_id, key, value)


def tracking_uri(workspace: Path) -> str:
    """``MLFLOW_TRACKING_URI``, or a SQLite file in the workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{workspace / 'mlflow.db'}"


def experiment_id(client: Any, workspace: Path, name: str) -> str:
    """Id of the experiment ``name``, made on first use. Artifacts go to ``mlartifacts/`` unless a server decides."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    local = tracking_uri(workspace).startswith("sqlite:")
    try:
        location = (workspace / "mlartifacts").as_uri() if local else None
        kind = {"mlflow.experimentKind": "custom_model_development"}
        return str(client.create_experiment(name, artifact_location=location, tags=kind))
    except MlflowException:
        return str(client.get_experiment_by_name(name).experiment_id)


@contextmanager
def stage_tracker(stage: str, workspace: Path, experiment: str) -> Iterator[Tracker]:
    """A run for one stage: a child of the pipeline's run where there is one, else a run of its own.

    ``RLHF_TRACKING=off`` switches it off. The run ends as FINISHED, as KILLED when it is preempted, or as FAILED
    when the block raises anything else.
    """
    if os.environ.get("RLHF_TRACKING") == "off":
        yield NullTracker()
        return
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    with paused_collector(), LockFile(workspace / ".rlhf" / "mlflow.lock") as lock:
        from mlflow import MlflowClient  # and more libraries when the client is made

        # Two processes that create the schema at once fail with "duplicate column name".
        lock.acquire()
        client = MlflowClient(tracking_uri(workspace))
        experiment_key = experiment_id(client, workspace, experiment)
    name = f"{stage} · {workspace.resolve().name} · {datetime.now():%Y-%m-%d %H:%M:%S}"
    tags = {"mlflow.runName": name, "stage": stage, "workspace": workspace.resolve().name, "rlhf.stage": stage}
    if os.environ.get(PARENT_RUN_VARIABLE):
        tags["mlflow.parentRunId"] = os.environ[PARENT_RUN_VARIABLE]
    run_id = client.create_run(experiment_key, tags=tags).info.run_id
    try:
        yield MlflowTracker(client, run_id)
    except (Preempted, StopNow):
        client.set_terminated(run_id, "KILLED")
        raise
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id, "FINISHED")

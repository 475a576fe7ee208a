"""The MLflow run of one stage, from its start to its end."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_core.errors import Preempted
from rlhf_core.git import git_revision
from rlhf_core.runtime.preemption import StopNow
from rlhf_core.storage.files import LockFile
from rlhf_core.storage.garbage_collection import paused_collector
from rlhf_core.tracking.client_settings import CLIENT_SETTINGS, default_environment
from rlhf_core.tracking.courier import DEFERRED_VARIABLE
from rlhf_core.tracking.delivery import address, deliver_waiting
from rlhf_core.tracking.journal import Journal, RunHeader
from rlhf_core.tracking.run_records import JournalTracker
from rlhf_core.tracking.tracker import NullTracker, Tracker

PARENT_RUN_VARIABLE = "RLHF_PARENT_RUN_ID"


def record_folder(workspace: Path) -> Path:
    """Return the workspace in whose MLflow ``workspace`` is recorded: itself, or the one that it is a trial of.

    A trial of `rlhf run --set` lies in ``workspaces/`` of its base, one of `dvc exp run --temp` or `--queue` in a
    folder under ``.dvc/tmp``, for which DVC names the base in ``DVC_ROOT``. Trials are compared in one place, and stay
    there when their folder goes.
    """
    folder = workspace.resolve()
    base = folder.parent.parent
    if folder.parent.name == "workspaces" and (base / "params.yaml").is_file() and (base / "dvc.yaml").is_file():
        return base
    dvc_root = os.environ.get("DVC_ROOT")
    if dvc_root and folder.is_relative_to(Path(dvc_root).resolve() / ".dvc" / "tmp"):
        root = next((parent for parent in (folder, *folder.parents) if (parent / ".dvc").is_dir()), folder)
        return record_folder(Path(dvc_root).resolve() / folder.relative_to(root))
    return folder


def tracking_uri(workspace: Path) -> str:
    """``MLFLOW_TRACKING_URI``, or a SQLite file in the workspace, see :func:`record_folder`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{record_folder(workspace) / 'mlflow.db'}"


def experiment_id(client: Any, workspace: Path, name: str) -> str:
    """Id of the experiment ``name``, made on first use. Artifacts go to ``mlartifacts/`` unless a server decides."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    local = tracking_uri(workspace).startswith("sqlite:")
    try:
        location = (record_folder(workspace) / "mlartifacts").as_uri() if local else None
        kind = {"mlflow.experimentKind": "custom_model_development"}
        return str(client.create_experiment(name, artifact_location=location, tags=kind))
    except MlflowException:
        return str(client.get_experiment_by_name(name).experiment_id)


def origin_tags(workspace: Path, command: str) -> dict[str, str]:
    """Who started a run, by which command and of which commit, under the names that MLflow's pages show."""
    try:
        user = os.environ.get("RLHF_ACTOR") or getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in containers
        user = str(os.getuid())
    tags = {"mlflow.user": user, "mlflow.source.name": command, "mlflow.source.type": "LOCAL"}
    revision = git_revision(workspace)
    return tags if revision == "none" else {**tags, "mlflow.source.git.commit": revision}


@contextmanager
def stage_tracker(stage: str, workspace: Path, experiment: str) -> Iterator[Tracker]:
    """A run for one stage: a child of the pipeline's run where there is one, else a run of its own.

    ``RLHF_TRACKING=off`` switches it off. The run ends as FINISHED, as KILLED when it is preempted, or as FAILED
    when the block raises anything else. While its server is away, what is recorded waits in ``.rlhf/tracking`` of the
    workspace, and the stage goes on. So does everything where ``RLHF_TRACKING_DEFERRED`` says that another process
    delivers it: the stage then never loads MLflow.

    Raises:
        ConfigError: The server does not accept the login.
    """
    if os.environ.get("RLHF_TRACKING") == "off":
        yield NullTracker()
        return
    uri = tracking_uri(workspace)
    name = f"{stage} · {workspace.resolve().name} · {datetime.now():%Y-%m-%d %H:%M:%S}"
    tags = {"mlflow.runName": name, "stage": stage, "workspace": workspace.resolve().name, "rlhf.stage": stage}
    tags |= origin_tags(workspace, f"rlhf stage {stage}")
    if os.environ.get(PARENT_RUN_VARIABLE):
        tags["mlflow.parentRunId"] = os.environ[PARENT_RUN_VARIABLE]
    header = RunHeader(address(uri), None, experiment, tags, int(time.time() * 1000))
    if os.environ.get(DEFERRED_VARIABLE):
        with _ending(JournalTracker(Journal.new(workspace, replace(header, deferred=True)))) as journal_tracker:
            yield journal_tracker
        return
    with (
        default_environment(CLIENT_SETTINGS),
        paused_collector(),
        LockFile(workspace / ".rlhf" / "mlflow.lock") as lock,
    ):
        from mlflow import MlflowClient  # and more libraries when the client is made

        # Two processes that create the schema at once fail with "duplicate column name".
        lock.acquire()
        client = MlflowClient(uri)
        journal = Journal.new(workspace, header)
        tracker = JournalTracker(journal, client, lambda: experiment_id(client, workspace, experiment))
        if tracker.begin():
            deliver_waiting(client, tracker.experiment_id, workspace, uri)
    with default_environment(CLIENT_SETTINGS), _ending(tracker):
        yield tracker


@contextmanager
def _ending(tracker: JournalTracker) -> Iterator[JournalTracker]:
    """End the run as the block ends."""
    try:
        yield tracker
    except (Preempted, StopNow):
        tracker.end("KILLED")
        raise
    except BaseException:
        tracker.end("FAILED")
        raise
    tracker.end("FINISHED")

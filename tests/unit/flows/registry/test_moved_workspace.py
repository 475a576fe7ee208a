"""A workspace that was moved or copied keeps its own models, and never writes into another
folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from mlflow import MlflowClient
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache

from flows.commands.registry_output import describe_terms
from flows.commands.status import recorded_run
from flows.pipeline.record import end_pipeline_run, start_pipeline_run
from flows.registry.client import OWNER_TAG, connect, repair_moved
from flows.workspace import ownership
from rlhf_core.tracking.origin import workspace_id


@pytest.fixture
def original(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with a run, its artifact, and a registered model that it owns; beside one with a
    similar name.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    workspace = tmp_path / "my work"
    workspace.mkdir()
    (workspace / "params.yaml").write_text("seed: 1\ntracking: {experiment: own}\n")
    shutil.copy(empty_database, workspace / "mlflow.db")
    run = start_pipeline_run(workspace, "first")
    client = connect(workspace)
    client.log_text(run, "hello", "note.txt")
    client.create_registered_model("rlhf-policy", tags={OWNER_TAG: ownership(workspace)})
    client.create_model_version("rlhf-policy", f"{workspace.as_uri()}/mlartifacts/model", run)
    (tmp_path / "my work-2").mkdir()
    # A neighbour whose name begins alike is another folder.
    client.create_experiment("neighbour", f"{workspace.as_uri()}-2/mlartifacts")
    end_pipeline_run(run, "completed", workspace)
    return workspace


def note(workspace: Path) -> tuple[MlflowClient, Any, Path]:
    """The client, the run and the place of its artifacts."""
    _artifact_repos_cache.clear()
    client = connect(workspace)
    (run,) = client.search_runs([client.get_experiment_by_name("own").experiment_id])
    return client, run, Path(unquote(urlsplit(run.info.artifact_uri).path))


def listing(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["another", "bob's", 'so "called"', "実験"])
def test_a_workspace_that_was_renamed_finds_its_last_run(original: Path, name: str) -> None:
    renamed = original.rename(original.with_name(name))
    (said,) = recorded_run(renamed, "own", False, None)
    assert "finished after" in said
    assert said.endswith(f" s  (MLflow run {note(renamed)[1].info.run_id})")


def test_a_moved_workspace_finds_its_models_and_stays_the_owner(
    original: Path, tmp_path: Path
) -> None:
    known, moved = workspace_id(original), tmp_path / "elsewhere" / "moved"
    shutil.copytree(original, moved)
    shutil.rmtree(original)
    client, run, place = note(moved)
    assert place.is_relative_to(moved) and (place / "note.txt").read_text() == "hello"
    assert Path(client.download_artifacts(run.info.run_id, "note.txt")).read_text() == "hello"
    version = client.get_model_version("rlhf-policy", "1")
    assert version.source == f"{moved.as_uri()}/mlartifacts/model"
    assert (
        client.get_experiment_by_name("neighbour").artifact_location
        == f"{original.as_uri()}-2/mlartifacts"
    )
    assert workspace_id(moved) == known and "owned by this workspace" in describe_terms(moved)
    assert repair_moved(moved) is None and not original.exists()


def test_a_copy_is_a_workspace_of_its_own_and_leaves_the_original_alone(
    original: Path, tmp_path: Path
) -> None:
    known, copy = workspace_id(original), tmp_path / "copy"
    shutil.copytree(original, copy)
    before = listing(original)
    client, run, place = note(copy)
    assert place.is_relative_to(copy)
    client.log_text(run.info.run_id, "of the copy", "other.txt")
    second = start_pipeline_run(copy, "second")
    client.log_text(second, "of the copy", "third.txt")
    assert listing(original) == before
    assert workspace_id(copy) != known and "owned by this workspace" in describe_terms(copy)
    assert workspace_id(original) == known and "owned by this workspace" in describe_terms(original)


def test_a_database_that_records_for_another_workspace_is_left_as_it_is(
    original: Path, tmp_path: Path
) -> None:
    trial = tmp_path / "trial"
    trial.mkdir()
    connect(original).create_experiment("trial", f"{trial.as_uri()}/mlartifacts")
    assert repair_moved(original) is None
    assert (
        connect(original).get_experiment_by_name("trial").artifact_location
        == f"{trial.as_uri()}/mlartifacts"
    )


def test_a_run_says_who_started_it_by_what(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ACTOR", "ann")
    outputs = "[{path: data/clean, md5: 0123abc.dir}]"
    (original / "dvc.lock").write_text(
        f"schema: '2.0'\nstages: {{validate: {{cmd: v, outs: {outputs}}}}}\n"
    )
    from rlhf_core.tracking.pipeline_run import log_final_artifacts

    run_id = start_pipeline_run(original, "told")
    log_final_artifacts(connect(original), run_id, original)
    run = connect(original).get_run(run_id)
    assert (
        run.data.tags["mlflow.user"] == "ann" and run.data.tags["mlflow.source.name"] == "rlhf run"
    )
    ((dataset, digest),) = [
        (one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs
    ]
    assert (dataset, digest) == ("data/clean", "0123abc.dir")

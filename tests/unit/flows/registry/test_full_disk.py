"""A database of MLflow whose disk is full, which cannot be made, or is none: told in one line."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import mlflow.store.db.utils
import pytest
from champion import champion_folder
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from small_disk import small_disk
from unit.flows.registry.conftest import MODEL, Registry, ScriptedMatch

from flows.commands.failures import report_error
from flows.registry import client as client_module
from flows.registry import stored_models
from flows.registry.client import connect
from flows.registry.history import read_history
from flows.registry.promote import promote
from rlhf_core.errors import EXIT_USER_ERROR, ModelError, RlhfError, cannot_write
from rlhf_core.tracking.stage_run import stage_tracker

PAGE = 4096


def fill(disk: Path, left: int) -> Path:
    """A file that takes what is free of ``disk`` but for so many pages."""
    filler, free = disk / "filler", os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with filler.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, free - left * PAGE)
    return filler


@pytest.mark.parametrize(
    "place", ["no database", "a folder", "in a file/mlflow.db", "/proc/rlhf/mlflow.db"]
)
def test_an_unreadable_database_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "no database").write_text("This is a text. " * 100)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "in a file").write_text("")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / place}")
    monkeypatch.setattr(
        mlflow.store.db.utils, "MAX_RETRY_COUNT", 0
    )  # else it would try for an hour
    for use in (connect, use_as_a_stage):
        with pytest.raises(RlhfError, match="cannot be opened") as refused:
            use(tmp_path)
        assert "\n" not in str(refused.value) and place in str(refused.value)


def use_as_a_stage(workspace: Path) -> None:
    with stage_tracker("sft", workspace, "rlhf"):
        pass


@pytest.mark.parametrize("source", ["runs:/{run}/model", "{artifacts}/model"])
def test_a_version_that_the_disk_has_no_room_for_is_told_so(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    client, workspace = registry.client, registry.workspace("owner")
    experiment = client.create_experiment("sources", (tmp_path / "stored").as_uri())
    run = client.create_run(experiment).info
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(6 * 2**20))
    client.log_artifact(run.run_id, str(weights), "model/artifacts/hf")
    client.create_registered_model(MODEL)
    client.create_model_version(
        MODEL, source.format(run=run.run_id, artifacts=run.artifact_uri), run.run_id
    )
    monkeypatch.setattr(stored_models, "_local_root", lambda *_: None)  # as of a server's artifacts
    with small_disk(workspace / ".rlhf", 4 * 2**20):
        with pytest.raises(
            ModelError, match=r"No space left on device.*; make room and run the command again$"
        ):
            stored_models._locate(client, workspace, MODEL, "1")
        assert not [path for path in (workspace / ".rlhf").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_promotion_on_a_full_disk_is_told_in_one_line_and_completed_once_there_is_room(
    tmp_path: Path,
    empty_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    disk, refusals = tmp_path / "disk", 0
    with small_disk(disk, 16 * 2**20):
        uri = f"sqlite:///{shutil.copy(empty_database, disk)}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        registry = Registry(tmp_path, MlflowClient(uri))
        workspace = registry.workspace("owner")
        promote(workspace, version=registry.add_version())
        for left in range(64):
            before, version = registry.aliases()["champion"], registry.add_version()
            filler = fill(disk, left)
            capfd.readouterr()
            try:
                promote(workspace, version=version, play=ScriptedMatch(0.9))
            except (RlhfError, OSError) as error:
                assert report_error(error) == EXIT_USER_ERROR
            filler.unlink()
            said = capfd.readouterr().err
            decided = len(read_history(registry.client, "rlhf-policy"))
            champion_folder(workspace)  # any use of the registry completes what was decided
            assert registry.aliases()["champion"] in (before, version)
            if registry.aliases()["champion"] == before:
                promote(workspace, version=version, play=ScriptedMatch(0.9))
                decided += 1
            assert (
                registry.aliases()["champion"] == version
                and registry.aliases()["previous"] == before
            )
            assert len(read_history(registry.client, "rlhf-policy")) == decided
            if not said:
                break
            refusals += 1
            assert said.count("\n") == 1 and "make room" in said and "[SQL" not in said
    assert refusals and not said


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Failed to download artifacts from path 'gates', please ensure that the path is correct.", "make room"),
        ("Failed to download artifacts from path 'metrics'", "make room"),
        ("the server is away", "try again when it answers"),
    ],
)  # fmt: skip
def test_a_download_without_room_names_the_disk(
    message: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = " (the disk of /small has room for 0 MiB and 9 files)"
    monkeypatch.setattr(client_module, "full_disks", lambda *_: full)
    asked = MlflowClient("http://127.0.0.1:9")
    with (
        pytest.raises(RlhfError, match=remedy) as told,
        client_module.registry_errors(asked, "read"),
    ):
        raise MlflowException(message)
    assert (full in str(told.value)) == (remedy == "make room") and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "make it writable"),
        (errno.EACCES, "make it writable"),
    ],
)
def test_a_workspace_that_cannot_be_written_to_has_the_right_remedy(
    number: int, remedy: str, tmp_path: Path
) -> None:
    assert remedy in str(cannot_write(tmp_path, OSError(number, os.strerror(number))))

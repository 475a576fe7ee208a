"""`rlhf gc`: what goes, what stays, and that nothing that is needed goes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from flows.commands import gc
from flows.commands.gc import collect_garbage, garbage_text
from flows.workspace import locked
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import LockFile, atomic_write_json

OLD = time.time() - 100 * gc.DAY


def bare(folder: Path) -> Path:
    """A workspace without stages."""
    folder.mkdir(parents=True)
    (folder / "params.yaml").write_text("seed: 1\n")
    (folder / "dvc.yaml").write_text("stages: {}\n")
    return folder


def age(folder: Path) -> None:
    """Let a trial look as if nobody had touched it for long."""
    for mark in (folder / "params.yaml", *(folder / ".rlhf").glob("*.json*")):
        os.utime(mark, (OLD, OLD))


def registered(version: str, registry: str = "sqlite:///mlflow.db") -> dict[str, Any]:
    """What a workspace records of a version in its own registry, or another one."""
    known = {"model": "rlhf-policy", "version": version, "registry": registry}
    return known | {"ungated": "", "dvc": None}


def old_trial(workspace: Path, entry: dict[str, Any] | None = None, name: str = "trial") -> Path:
    """A trial of a workspace that nobody has touched for long; it registered ``entry``."""
    trial = bare(workspace / "workspaces" / name)
    if entry is not None:
        (trial / ".rlhf").mkdir()
        atomic_write_json(trial / ".rlhf" / "registered.json", {"models/policy": entry})
    age(trial)
    return trial


def know_aliases(monkeypatch: pytest.MonkeyPatch, aliases: dict[str, dict[str, str]]) -> None:
    """Let the workspace's registry have these aliases, by model."""
    monkeypatch.setattr(gc, "has_record", lambda _: True)
    monkeypatch.setattr(gc, "connect", lambda _: None)
    monkeypatch.setattr(gc, "read_aliases", lambda _, model: aliases.get(model, {}))


def partial_state(workspace: Path, key: str, changed: float) -> Path:
    folder = workspace / "work" / "sft" / key
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text("{}\n")
    for path in (folder / "history.jsonl", folder):
        os.utime(path, (changed, changed))
    return folder


def test_what_nothing_needs_goes_and_only_when_asked(tmp_path: Path) -> None:
    base = bare(tmp_path / "run")
    old, new = (bare(base / "workspaces" / name) for name in ("old", "new"))
    age(old)
    earlier, newest = (partial_state(base, key, OLD + n) for n, key in enumerate("ab"))
    cached = base / ".dvc" / "cache" / "files" / "md5" / "00" / "11"
    cached.parent.mkdir(parents=True)
    cached.write_text("of an experiment, a branch or another workspace\n")

    found = collect_garbage(base, days=30, delete=False)
    assert {one.path for one in found if one.goes} == {old, earlier}
    assert all(path.exists() for path in (old, earlier))
    text = garbage_text(base, found, deleted=False)
    assert "nothing was deleted" in text and "workspaces/new: used 0 days ago" in text

    collect_garbage(base, days=30, delete=True)
    assert not old.exists() and not earlier.exists()
    assert all(path.exists() for path in (new, newest, cached))


def test_a_training_left_lately_for_other_settings_stays(tmp_path: Path) -> None:
    base = bare(tmp_path / "run")
    paused = partial_state(base, "a", time.time() - 2 * gc.DAY)
    os.utime(paused, (OLD, OLD))  # the folder is as old as its start; its files were written later
    partial_state(base, "b", time.time())
    collect_garbage(base, days=30, delete=True)
    assert paused.is_dir()
    collect_garbage(base, days=1, delete=True)
    assert not paused.exists()


def test_a_trial_whose_model_has_an_alias_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = bare(tmp_path / "run")
    know_aliases(monkeypatch, {"rlhf-policy": {"champion": "3"}})
    champion = old_trial(workspace, registered("3"), "champion")
    other = old_trial(workspace, registered("2"), "other")
    found = collect_garbage(workspace, days=30, delete=True)
    assert [(one.path, one.goes) for one in found] == [(champion, False), (other, True)]
    assert found[0].reason == "rlhf-policy@champion was made there"
    assert champion.is_dir() and not other.exists()


def test_a_trial_that_registered_stays_where_its_registry_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = bare(tmp_path / "run")
    trial = old_trial(workspace, registered("1"))
    monkeypatch.setattr(gc, "has_record", lambda _: False)
    (found,) = collect_garbage(workspace, days=30, delete=True)
    assert not found.goes and trial.is_dir()


def test_a_trial_that_registered_elsewhere_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same number in the registry that is used now is another version."""
    workspace = bare(tmp_path / "run")
    trial = old_trial(workspace, registered("1", "http://other.host:5000"))
    know_aliases(monkeypatch, {})
    (found,) = collect_garbage(workspace, days=30, delete=True)
    assert trial.is_dir() and "their registry is not named here" in found.reason


def test_an_alias_of_a_model_of_its_own_keeps_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its latest registration may be a version without one."""
    workspace = bare(tmp_path / "run")
    trial = bare(workspace / "workspaces" / "trial")
    (trial / "params.yaml").write_text("registry: {policy: own}\n")
    know_aliases(monkeypatch, {"own": {"champion": "1"}})
    age(trial)
    (found,) = collect_garbage(workspace, days=30, delete=True)
    assert found.reason == "own@champion was made there" and trial.is_dir()


def test_nothing_is_deleted_beside_a_run_or_a_stage_or_in_a_trial(tmp_path: Path) -> None:
    workspace = bare(tmp_path / "run")
    trial = bare(workspace / "workspaces" / "trial")
    leftovers = [partial_state(workspace, key, OLD + n) for n, key in enumerate("ab")]
    with locked(trial), pytest.raises(RlhfError, match="is in use by"):
        collect_garbage(workspace, days=0, delete=True)
    (workspace / ".rlhf" / "stages").mkdir(parents=True, exist_ok=True)
    with LockFile(workspace / ".rlhf" / "stages" / "sft.running") as lock:
        assert lock.try_acquire()
        with pytest.raises(RlhfError, match="stage 'sft' runs in"):
            collect_garbage(workspace, days=0, delete=True)
    with pytest.raises(RlhfError, match="is a trial of"):
        collect_garbage(trial, days=0, delete=True)
    assert all(folder.is_dir() for folder in (*leftovers, trial))

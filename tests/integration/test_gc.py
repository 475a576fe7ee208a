"""`rlhf gc` in real DVC workspaces: what goes, what stays, and that nothing that is needed goes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.commands import gc
from flows.commands.gc import collect_garbage, garbage_text
from flows.commands.init import initialise
from flows.dvc_repo.recipe import trial_workspace
from flows.workspace import locked
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import LockFile, atomic_write_json

OLD = time.time() - 100 * gc.DAY


def dvc(workspace: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "dvc", *arguments]
    subprocess.run(command, cwd=workspace, check=True, capture_output=True)


def add(workspace: Path, name: str, text: str) -> Path:
    """Let DVC track a file with this text, and return where its cache has it."""
    (workspace / name).write_text(text)
    dvc(workspace, "add", "--quiet", name)
    digest = (workspace / f"{name}.dvc").read_text().partition("md5: ")[2].split()[0]
    root = workspace.parents[1] if workspace.parent.name == "workspaces" else workspace
    return root / ".dvc" / "cache" / "files" / "md5" / digest[:2] / digest[2:]


def age(folder: Path) -> None:
    """Let a trial look as if nobody had touched it for long."""
    for mark in (folder / "params.yaml", *(folder / ".rlhf").glob("*.json*")):
        os.utime(mark, (OLD, OLD))


def partial_state(workspace: Path, key: str, changed: float) -> Path:
    folder = workspace / "work" / "sft" / key
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text("{}\n")
    os.utime(folder, (changed, changed))
    return folder


@pytest.mark.dear("DVC deletes for good")
def test_what_nothing_needs_goes_and_only_when_asked(tmp_path: Path) -> None:
    workspace = initialise(tmp_path / "run", "smoke", [])
    unneeded = add(workspace, "data.txt", "the first version\n")
    needed = add(workspace, "data.txt", "the second version\n")
    old = trial_workspace(workspace, None, ["seed=2"])
    new = trial_workspace(workspace, None, ["seed=3"])
    of_old, of_new = (
        add(old, "old.txt", "of the old one\n"),
        add(new, "new.txt", "of the new one\n"),
    )
    age(old)
    earlier, newest = (partial_state(workspace, key, OLD + n) for n, key in enumerate("ab"))

    found, cache = collect_garbage(workspace, days=30, delete=False)
    assert {one.path for one in found if one.goes} == {old, earlier}
    assert (cache.objects, cache.freed) == (2, None), "what only the trial that goes needs goes too"
    assert all(path.exists() for path in (unneeded, of_old, old, earlier))
    text = garbage_text(workspace, found, cache, deleted=False)
    assert "nothing was deleted" in text and f"workspaces/{new.name}: used 0 days ago" in text

    found, cache = collect_garbage(workspace, days=30, delete=True)
    assert cache.objects == 2 and cache.freed
    assert not any(path.exists() for path in (unneeded, of_old, old, earlier))
    assert all(path.exists() for path in (needed, of_new, new, newest))
    again, cache = collect_garbage(workspace, days=30, delete=True)
    assert not [one for one in again if one.goes] and cache.objects == 0


def bare(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "params.yaml").write_text("seed: 1\n")
    (folder / "dvc.yaml").write_text("stages: {}\n")
    return folder


def test_a_trial_whose_model_has_an_alias_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = bare(tmp_path / "run")
    trials = [bare(workspace / "workspaces" / name) for name in ("champion", "other")]
    monkeypatch.setattr(gc, "_cache", lambda *_: gc.CacheUse(0))
    monkeypatch.setattr(gc, "has_record", lambda _: True)
    monkeypatch.setattr(gc, "connect", lambda _: None)
    aliases = {"rlhf-policy": {"champion": "3"}}
    monkeypatch.setattr(gc, "read_aliases", lambda _, model: aliases.get(model, {}))
    for trial, version in zip(trials, ("3", "2"), strict=True):
        entry = {"model": "rlhf-policy", "version": version, "ungated": "", "dvc": None}
        (trial / ".rlhf").mkdir()
        atomic_write_json(trial / ".rlhf" / "registered.json", {"models/policy": entry})
        age(trial)
    found, _ = collect_garbage(workspace, days=30, delete=True)
    assert [(one.path, one.goes) for one in found] == [(trials[0], False), (trials[1], True)]
    assert found[0].reason == "rlhf-policy@champion was made there"
    assert trials[0].is_dir() and not trials[1].exists()


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

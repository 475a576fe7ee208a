"""`rlhf gc` in real DVC workspaces: what goes, what stays, and that nothing that is needed goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from dvc.cli import main as dvc_command

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


class Repository:
    """A workspace with a DVC root, whose cache its trials share."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, base: Path | None = None):
        self.folder, self.monkeypatch = bare(folder), monkeypatch
        self.cache = (base or folder) / ".dvc" / "cache"
        self.dvc("init", "--no-scm", "--quiet")
        if base is not None:
            self.dvc("cache", "dir", "--local", str(self.cache))

    def dvc(self, *arguments: str) -> None:
        """Run a DVC command in this process: starting one takes a second."""
        with self.monkeypatch.context() as there:
            there.chdir(self.folder)
            assert dvc_command(list(arguments)) == 0

    def add(self, name: str, text: str) -> Path:
        """Let DVC track a file with this text, and return where the cache has it."""
        (self.folder / name).write_text(text)
        self.dvc("add", "--quiet", name)
        digest = (self.folder / f"{name}.dvc").read_text().partition("md5: ")[2].split()[0]
        return self.cache / "files" / "md5" / digest[:2] / digest[2:]


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
def test_what_nothing_needs_goes_and_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "run"
    workspace = Repository(base, monkeypatch)
    old, new = (
        Repository(base / "workspaces" / name, monkeypatch, base) for name in ("old", "new")
    )
    unneeded, needed = (workspace.add("data.txt", f"{version}\n") for version in (1, 2))
    of_old, of_new = (trial.add("data.txt", f"of {trial.folder.name}\n") for trial in (old, new))
    age(old.folder)
    earlier, newest = (partial_state(base, key, OLD + n) for n, key in enumerate("ab"))

    found, cache = collect_garbage(base, days=30, delete=False)
    assert {one.path for one in found if one.goes} == {old.folder, earlier}
    assert (cache.objects, cache.freed) == (2, None), "what only the trial that goes needs goes too"
    assert all(path.exists() for path in (unneeded, of_old, old.folder, earlier))
    text = garbage_text(base, found, cache, deleted=False)
    assert "nothing was deleted" in text and "workspaces/new: used 0 days ago" in text

    found, cache = collect_garbage(base, days=30, delete=True)
    assert cache.objects == 2 and cache.freed
    assert not any(path.exists() for path in (unneeded, of_old, old.folder, earlier))
    assert all(path.exists() for path in (needed, of_new, new.folder, newest))


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

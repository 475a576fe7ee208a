"""``rlhf gc``: what a workspace keeps that nothing needs any more, and its deletion.

Partial states of other settings, and trials that nobody has touched for long. What DVC's cache holds
for them is left to ``dvc gc``: only its user knows which experiments, branches and other workspaces
need it. Registered models are files of the registry: ``rlhf registry gc``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from flows.dvc_repo.recipe import TRIALS
from flows.dvc_repo.root import cache_of
from flows.registry.client import connect, has_record, read_aliases, registry_of_record
from flows.registry.register import REGISTERED
from flows.workspace import PRIVATE, is_workspace, lock_holder, locked
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import REMOVED, LockFile, read_json, remove_tree
from rlhf_core.tracking.origin import record_folder

DAY = 86_400
MIB = 1 << 20


@dataclass(frozen=True)
class Leftover:
    """A folder that ``rlhf gc`` has looked at.

    Attributes:
        path: The folder.
        size: Bytes of its files.
        reason: Why it goes, or why it stays.
        goes: Whether it goes.
    """

    path: Path
    size: int
    reason: str
    goes: bool


def collect_garbage(workspace: Path, *, days: int, delete: bool) -> list[Leftover]:
    """Find what nothing needs any more, and delete it if ``delete``.

    Args:
        workspace: The workspace; of a trial the one that it belongs to is looked through.
        days: What nobody has touched for so many days goes.

    Raises:
        RlhfError: It is a trial, a command works in the workspace or a trial of it, the registry
            does not answer.
    """
    workspace = workspace.resolve()
    base = record_folder(workspace)
    if base != workspace:
        raise RlhfError(
            f"{workspace} is a trial of {base}, with whose data it shares a cache; run it there"
        )
    trials = trials_of(workspace)
    with ExitStack() as locks:
        if delete:
            for folder in (workspace, *trials):
                locks.enter_context(locked(folder))
                _refuse_running_stage(folder)
        found = [*_trials(workspace, trials, days, delete), *_partial_states(workspace, days)]
        if delete:
            for one in found:
                if one.goes:
                    remove_tree(one.path)
        return found


def trials_of(workspace: Path) -> list[Path]:
    """The workspaces that `rlhf run --profile` and `--set` made in a workspace."""
    return [folder for folder in sorted((workspace / TRIALS).glob("*")) if is_workspace(folder)]


def _refuse_running_stage(workspace: Path) -> None:
    """Raise ``RlhfError`` where a stage runs that was started without a run."""
    for mark in sorted((workspace / PRIVATE / "stages").glob("*.running")):
        with LockFile(mark) as lock:
            if not lock.try_acquire():
                raise RlhfError(f"stage '{mark.stem}' runs in {workspace}; wait for it, or stop it")


def _trials(workspace: Path, trials: Sequence[Path], days: int, deleting: bool) -> list[Leftover]:
    found = []
    for trial in trials:
        aliased = _aliased(workspace, trial)
        registered = _registered_by(trial)
        versions = registered.pop(registry_of_record(trial), set())
        age = _days_since(_last_change(trial))
        own = set(_models_of(trial)) - set(_models_of(workspace))
        needed = {key for key in aliased if key in versions or key[0] in own}
        holder = None if deleting else lock_holder(trial)  # this command holds it meanwhile
        goes = False
        if holder is not None:
            reason = f"{holder} works there"
        elif needed:
            reason = f"{aliased[min(needed)]} was made there"
        elif registered or (versions and not has_record(workspace)):
            # A version that cannot be looked up is no proof that nothing needs it.
            reason = "it registered models, and their registry is not named here"
        elif age < days:
            reason = f"used {age:.0f} days ago"
        else:
            goes, reason = True, f"a trial that was last used {age:.0f} days ago"
        found.append(Leftover(trial, _size(trial), reason, goes))
    return found


def _aliased(workspace: Path, trial: Path) -> dict[tuple[str, str], str]:
    """The versions with an alias of the models that a trial registers, which have names of its own
    or those of its base: by model and number.
    """
    if not has_record(workspace):
        return {}
    client = connect(workspace)
    found = {}
    for model in _models_of(trial):
        for alias, version in read_aliases(client, model).items():
            found[model, version] = f"{model}@{alias}"
    return found


def _models_of(workspace: Path) -> tuple[str, str]:
    """The names under which a workspace registers its models."""
    config = load_section(workspace, "registry", RegistryConfig)
    return config.policy, config.reward_model


def _registered_by(workspace: Path) -> dict[str, set[tuple[str, str]]]:
    """The versions that were registered of a workspace's models, by the registry."""
    file = workspace / PRIVATE / REGISTERED
    versions: dict[str, set[tuple[str, str]]] = {}
    for entry in read_json(file).values() if file.is_file() else ():
        of_registry = versions.setdefault(str(entry.get("registry")), set())
        of_registry.add((str(entry["model"]), str(entry["version"])))
    return versions


def _last_change(workspace: Path) -> float:
    """When a command last changed a workspace, by its settings, results and events."""
    marks = [
        workspace / "params.yaml",
        workspace / "dvc.lock",
        *(workspace / PRIVATE).glob("*.json*"),
    ]
    return max(mark.stat().st_mtime for mark in marks if mark.is_file())


def _partial_states(workspace: Path, days: int) -> list[Leftover]:
    """Partial states of the stages of a workspace that stays.

    Of each stage the newest may be resumed, and so may one that was left lately for other settings.
    """
    found = []
    for stage in sorted((workspace / "work").glob("*")):
        states = sorted(stage.glob("[!.]*"), key=_last_write)
        for state in states[:-1]:
            age = _days_since(_last_write(state))
            reason = f"of other settings, last written {age:.0f} days ago"
            found.append(Leftover(state, _size(state), reason, age >= days))
        for state in states[-1:]:
            found.append(Leftover(state, _size(state), "the next run may resume from it", False))
        for left in sorted(stage.glob(f".*{REMOVED}")):
            found.append(Leftover(left, _size(left), "of an interrupted deletion", True))
    return found


def _last_write(folder: Path) -> float:
    """When something in a folder was last written; 0 where it has gone meanwhile."""
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            times.append(path.lstat().st_mtime)
    return max(times)


def _days_since(moment: float) -> float:
    return (time.time() - moment) / DAY


def _size(folder: Path) -> int:
    """Bytes of the files below a folder that have one name alone: those that are linked from the
    cache stay there.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a run may work there
                status = os.lstat(os.path.join(parent, name))
                total += status.st_size if status.st_nlink == 1 else 0
    return total


def garbage_text(workspace: Path, found: Sequence[Leftover], *, deleted: bool) -> str:
    """List what goes and what stays, with sizes and reasons."""
    lines = []
    for one in found:
        verb = "stays"
        if one.goes:
            verb = "deleted" if deleted else "goes"
        name = one.path.relative_to(workspace.resolve())
        lines.append(f"{verb:<8}{one.size / MIB:>9.1f} MiB  {name}: {one.reason}")
    if any(one.goes for one in found) and not deleted:
        lines.append("nothing was deleted; `rlhf gc --yes` deletes what goes")
    size = _size(cache_of(workspace.resolve())) / MIB
    lines.append(
        f"DVC cache: {size:.1f} MiB; `dvc gc --workspace --all-branches --all-tags` frees what these do not need: "
        "add --all-experiments if you use `dvc exp`, and --projects with every trial and workspace that shares it"
    )
    lines.append("registered versions: `rlhf registry gc`")
    return "\n".join(lines)

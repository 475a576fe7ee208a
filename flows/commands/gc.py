"""``rlhf gc``: what a workspace keeps that nothing needs any more, and its deletion.

Partial states of other settings, trials that nobody has touched for long, and what no workspace,
branch or tag needs of the DVC cache. Registered models are files of the registry:
``rlhf registry gc``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from flows.dvc_repo.recipe import TRIALS
from flows.dvc_repo.root import cache_of
from flows.registry.client import connect, has_record, read_aliases
from flows.registry.workspace import FILE
from flows.supervision.processes import run_module
from flows.workspace import PRIVATE, is_workspace, lock_holder, locked
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import REMOVED, LockFile, read_json, remove_tree
from rlhf_core.tracking.stage_run import record_folder

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


@dataclass(frozen=True)
class CacheUse:
    """What DVC deletes from the cache.

    Attributes:
        size: Bytes of the cache before.
        freed: Bytes that were freed; None where nothing was deleted.
        objects: How many objects nothing needs.
        left_alone: Why nothing of it may be deleted; empty where DVC was asked.
    """

    size: int
    freed: int | None = None
    objects: int = 0
    left_alone: str = ""


def collect_garbage(workspace: Path, *, days: int, delete: bool) -> tuple[list[Leftover], CacheUse]:
    """Find what nothing needs any more, and delete it if ``delete``.

    Args:
        workspace: The workspace; of a trial the one that it belongs to is looked through.
        days: A trial that nobody has touched for so many days goes.

    Raises:
        RlhfError: It is a trial, a command works in the workspace or a trial of it, the registry
            does not answer, or DVC fails.
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
        found = [*_trials(workspace, trials, days, delete), *_partial_states(workspace)]
        if delete:
            for one in found:
                if one.goes:
                    remove_tree(one.path)
        staying = {one.path for one in found if not one.goes}
        return found, _cache(workspace, [trial for trial in trials if trial in staying], delete)


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
        age = (time.time() - _last_change(trial)) / DAY
        needed = _versions_of(trial) & aliased.keys()
        holder = None if deleting else lock_holder(trial)  # this command holds it meanwhile
        goes = False
        if holder is not None:
            reason = f"{holder} works there"
        elif needed:
            reason = f"{aliased[min(needed)]} was made there"
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
    config = load_section(trial, "registry", RegistryConfig)
    client = connect(workspace)
    found = {}
    for model in (config.policy, config.reward_model):
        for alias, version in read_aliases(client, model).items():
            found[model, version] = f"{model}@{alias}"
    return found


def _versions_of(workspace: Path) -> set[tuple[str, str]]:
    """The versions that were registered of a workspace's models."""
    file = workspace / PRIVATE / FILE
    if not file.is_file():
        return set()
    return {(str(entry["model"]), str(entry["version"])) for entry in read_json(file).values()}


def _last_change(workspace: Path) -> float:
    """When a command last changed a workspace, by its settings, results and events."""
    marks = [
        workspace / "params.yaml",
        workspace / "dvc.lock",
        *(workspace / PRIVATE).glob("*.json*"),
    ]
    return max(mark.stat().st_mtime for mark in marks if mark.is_file())


def _partial_states(workspace: Path) -> list[Leftover]:
    """Partial states of the stages of a workspace that stays: of each stage the newest may be
    resumed.
    """
    found = []
    for stage in sorted((workspace / "work").glob("*")):
        states = sorted(stage.glob("[!.]*"), key=lambda state: state.stat().st_mtime)
        for state in states[:-1]:
            found.append(Leftover(state, _size(state), "older than the stage's newest state", True))
        for state in states[-1:]:
            found.append(Leftover(state, _size(state), "the next run may resume from it", False))
        for left in sorted(stage.glob(f".*{REMOVED}")):
            found.append(Leftover(left, _size(left), "of an interrupted deletion", True))
    return found


def _cache(workspace: Path, trials: Sequence[Path], delete: bool) -> CacheUse:
    """Let DVC delete from the cache what the workspace, its trials, branches and tags do not need."""
    cache = cache_of(workspace)
    size = _size(cache)
    if not cache.is_relative_to(workspace):
        others = (
            "other workspaces may share it; `dvc gc --workspace --projects` takes their folders"
        )
        return CacheUse(size, left_alone=others)
    options = ["--workspace", "--all-branches", "--all-tags", "--force"]
    if trials:
        options += ["--projects", *map(str, trials)]
    result = run_module(workspace, "dvc", "gc", *options, *([] if delete else ["--dry"]))
    if result.exit_code:
        raise RlhfError(f"dvc gc in {workspace} failed: {result.error_line}")
    removed = re.search(r"Removed (\d+) objects", result.stdout + result.stderr)
    objects = int(removed[1]) if removed else 0
    return CacheUse(size, size - _size(cache) if delete else None, objects)


def _size(folder: Path) -> int:
    """Bytes of the files below a folder that have one name alone: those that are linked from the
    cache stay there.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            total += status.st_size if status.st_nlink == 1 else 0
    return total


def garbage_text(
    workspace: Path, found: Sequence[Leftover], cache: CacheUse, *, deleted: bool
) -> str:
    """List what goes and what stays, with sizes and reasons."""
    lines = []
    for one in found:
        verb = "stays" if not one.goes else "deleted" if deleted else "goes"
        name = one.path.relative_to(workspace.resolve())
        lines.append(f"{verb:<8}{one.size / MIB:>9.1f} MiB  {name}: {one.reason}")
    if cache.left_alone:
        lines.append(f"{'stays':<8}{cache.size / MIB:>9.1f} MiB  DVC cache: {cache.left_alone}")
    elif cache.freed is not None:
        lines.append(
            f"{'deleted':<8}{cache.freed / MIB:>9.1f} MiB  DVC cache: {cache.objects} objects that nothing needed"
        )
    else:
        lines.append(
            f"DVC cache: nothing needs {cache.objects} objects of it; it has {cache.size / MIB:.1f} MiB"
        )
    goes = cache.objects > 0 or any(one.goes for one in found)
    if goes and not deleted:
        lines.append("nothing was deleted; `rlhf gc --yes` deletes what goes")
    lines.append("registered versions: `rlhf registry gc`")
    return "\n".join(lines)

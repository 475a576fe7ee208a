"""Workspace folders: finding one, its id, private files, names and locks, and their cleanup.

One pipeline run at a time has a workspace, and one attempt at a time a stage.
``python -m flows.workspace WORKSPACE`` does the cleanup for a command that holds the workspace's
lock.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.supervision.processes import start_token
from flows.supervision.signals import STOP
from rlhf_core.errors import DataError, ModelError, RlhfError, cannot_write
from rlhf_core.storage.data_files import expand, is_url
from rlhf_core.storage.files import (
    LockFile,
    atomic_write_json,
    read_json,
    temporary_root,
)

PRIVATE = ".rlhf"


def find_workspace(folder: Path | None = None) -> Path:
    """Return the absolute path of a workspace, by default the nearest at or above this folder.

    Raises:
        RlhfError: ``folder`` is not a workspace, or there is none at or above the current folder.
    """
    if folder is not None:
        if not is_workspace(folder):
            raise RlhfError(
                f"{folder} is not a workspace (it has no params.yaml and dvc.yaml); make one with: "
                f"rlhf init {shlex.quote(str(folder))}"
            )
        return folder.resolve()
    current = Path.cwd().resolve()
    for candidate in (current, *current.parents):
        if is_workspace(candidate):
            return candidate
    raise RlhfError(
        f"there is no workspace at or above {current}; make one with `rlhf init DIR`, or name one with --workspace DIR"
    )


def is_workspace(folder: Path) -> bool:
    """Whether ``folder`` holds params.yaml and dvc.yaml."""
    return (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file()


def private_path(workspace: Path, *parts: str) -> Path:
    """Return a path under the workspace's own ``.rlhf`` folder, whose parent folder is created.

    Raises:
        RlhfError: the workspace cannot be written to.
    """
    path = workspace.joinpath(PRIVATE, *parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(workspace, error) from error
    return path


def display_path(path: Path) -> str:
    """Return a path as a person would type it in the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("../..") else relative


def model_folder(path: Path, workspace: Path | None = None) -> Path:
    """Return the model folder ``path``, relative to the current folder, else to ``workspace``.

    Raises:
        ModelError: There is no model.
    """
    if workspace is not None and not path.exists():
        path = workspace / path
    if not (path / "config.json").is_file():
        adapter = ""
        if (path / "adapter_config.json").is_file():
            adapter = ", only an adapter, to be merged into its model"
        raise ModelError(
            f"no model at {path} (it has no config.json{adapter}); name a model folder such as models/sft, or none "
            "to talk to the champion"
        )
    return path


def printed_line(text: str) -> str:
    """Return ``text`` on one line without control characters, which could imitate other entries."""
    printable = ""
    for character in text:
        printable += character if character.isprintable() else " "
    return " ".join(printable.split())


ACTOR_VARIABLE = "RLHF_ACTOR"


def actor() -> str:
    """Return who acts: ``RLHF_ACTOR``, which a CI job sets, else ``user@host``."""
    from rlhf_core.tracking.origin import user_name

    return printed_line(os.environ.get(ACTOR_VARIABLE, "")) or f"{user_name()}@{platform.node()}"


def ownership(workspace: Path) -> str:
    """The tag by which ``workspace`` owns a registered model: its id, then its folder for messages.

    The first promotion makes a workspace the owner. Others may register versions under the same
    name; whether one becomes champion is decided by the owner's gates, prompts, judge and bounds.
    """
    from rlhf_core.tracking.origin import workspace_id

    return f"{workspace_id(workspace)} {workspace}"


def is_elsewhere(source: str) -> bool:
    """Whether a source of data is a URL or a hub id, which is looked up when it is read."""
    return is_url(source) or source.startswith("hub:")


def matching_files(source: str, workspace: Path) -> list[Path]:
    """Return the files that a source names, relative to ``workspace``; empty if it names none."""
    try:
        return expand(source, workspace)
    except DataError:
        return []


SEPARATOR = " · "


def workspace_slug(workspace: Path) -> str:
    """Return the workspace's name in lowercase letters, digits and dashes, for names on servers.

    That of a trial begins with its base: trials of the same settings have the same folder name in
    every base.
    """
    from rlhf_core.tracking.origin import record_folder

    folder = workspace.resolve()
    names = dict.fromkeys([record_folder(folder), folder])
    joined = "-".join(part.name for part in names).lower()
    return re.sub(r"[^a-z0-9]+", "-", joined).strip("-") or "workspace"


def run_label(workspace: Path, profile: str, started: datetime) -> str:
    """Return ``WORKSPACE · PROFILE · TIME``, with the profile if it says more than the name."""
    name = workspace.resolve().name
    parts = [name, profile if profile != name else "", f"{started:%Y-%m-%d %H:%M:%S}"]
    return SEPARATOR.join(part for part in parts if part)


def job_label(workspace: str, stage: str) -> str:
    """Return the name of a flow run that computes one stage: ``WORKSPACE · STAGE``."""
    return SEPARATOR.join([Path(workspace).name, stage])


def run_tags(workspace: Path, profile: str) -> Mapping[str, str]:
    """Return what a person looks for a run by."""
    return {"workspace": workspace.resolve().name} | ({"profile": profile} if profile else {})


# Names the workspace whose lock the command holds that started this process.
LOCK_HELD_VARIABLE = "RLHF_LOCK_HELD"
WORKSPACE_LOCK = "lock"
POLL_SECONDS = 0.3


@dataclass(frozen=True)
class LockHolder:
    """The command that holds a lock, by the lock file; ``since`` is a local time."""

    pid: int
    since: str
    command: str

    def __str__(self) -> str:
        return f"`{self.command}` (pid {self.pid}, since {self.since})"


@contextmanager
def locked(
    workspace: Path,
    name: str = WORKSPACE_LOCK,
    *,
    wait: bool = False,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[int]:
    """Hold the lock ``.rlhf/NAME`` for the block; yield its file descriptor.

    The lock belongs to this process and to every supervisor that inherits the descriptor. The
    kernel frees it when the last of them has ended. A holder that has died is therefore always
    waited for: what its supervisors still stop would run beside this process.

    Args:
        wait: wait for a live holder too, instead of failing.
        on_wait: given one line about the holder; a command that passes it has the option
            ``--wait``.

    Raises:
        RlhfError: another process holds the lock, or the file cannot be written.
        KeyboardInterrupt: the stop flag was raised while waiting.
    """
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(LockFile(private_path(workspace, name)))
        except OSError as error:
            raise cannot_write(workspace, error) from error
        announced = False
        while not lock.try_acquire():
            holder = _read_holder(lock.path)
            alive = holder is None or start_token(holder.pid) is not None
            if alive and not wait:
                remedy = f"wait for it{' with --wait' if on_wait else ''}, or stop it"
                raise RlhfError(
                    f"{workspace} is in use by {holder or 'another rlhf process'}; {remedy}"
                )
            if not announced and on_wait:
                message = f"waiting for {holder or 'another rlhf process'}"
                on_wait(message if alive else f"{message} to be cleaned up")
                announced = True
            if STOP.wait(POLL_SECONDS):
                raise KeyboardInterrupt
        command = " ".join(["rlhf", *sys.argv[1:]])
        holder = LockHolder(os.getpid(), datetime.now().isoformat(timespec="seconds"), command)
        lock.stream.truncate(0)
        lock.stream.write(json.dumps(asdict(holder)))
        lock.stream.flush()
        try:
            yield lock.stream.fileno()
        finally:
            lock.stream.truncate(0)


def lock_holder(workspace: Path) -> LockHolder | None:
    """Return the live command that holds the workspace, None if there is none."""
    holder = _read_holder(workspace / PRIVATE / WORKSPACE_LOCK)
    return holder if holder is not None and start_token(holder.pid) is not None else None


def _read_holder(path: Path) -> LockHolder | None:
    try:
        return LockHolder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


SERVICES_FILE = "services.json"


def record_services(workspace: Path, api_url: str, mlflow_url: str) -> None:
    """Record the addresses of the Prefect server and the MLflow pages that this process runs."""
    pid = os.getpid()
    record = {
        "pid": pid,
        "start_token": start_token(pid),
        "api_url": api_url,
        "mlflow_url": mlflow_url,
    }
    atomic_write_json(private_path(workspace, SERVICES_FILE), record)


def running_services(workspace: Path) -> Mapping[str, str]:
    """Return ``api_url`` and ``mlflow_url`` of the live ``rlhf up`` here; empty without one."""
    try:
        record = json.loads((workspace / PRIVATE / SERVICES_FILE).read_text(encoding="utf-8"))
        if start_token(int(record["pid"])) != record["start_token"]:
            return {}
        return {name: str(record[name]) for name in ("api_url", "mlflow_url")}
    except (OSError, ValueError, KeyError):
        return {}


def forget_services(workspace: Path) -> None:
    """Remove the record made by :func:`record_services`."""
    (workspace / PRIVATE / SERVICES_FILE).unlink(missing_ok=True)


def cleanup(workspace: Path) -> list[str]:
    """Remove what DVC and ``rlhf up`` could not, and return a line on each.

    The caller holds the workspace's lock. DVC writes ``.dvc/tmp/rwlock``, its table of locks, in
    place: one that is killed may leave it empty, and then every command is refused. A killed
    process that nobody has reaped, as in a container without an init, is alive to DVC, so that what
    it locked would stay locked.
    """
    report = []
    locks = workspace / ".dvc" / "tmp" / "rwlock"
    try:
        held = {"write": {}, "read": {}} | json.loads(locks.read_text(encoding="utf-8"))
        kept = _locks_of_the_living(held)
    except OSError:
        pass
    except (ValueError, TypeError, KeyError, AttributeError):
        locks.unlink(missing_ok=True)
        report.append("removed DVC's table of locks, which could not be read")
    else:
        if kept != held:
            atomic_write_json(locks, kept)
            report.append("released what a killed DVC had locked")
    for folder in _environments_of_the_dead(workspace):
        shutil.rmtree(folder, ignore_errors=True)
        report.append(f"removed {folder}, a killed worker's copy of its environment")
    if not running_services(workspace):
        forget_services(workspace)
    return report


RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"  # by which Prefect tells a process the run that it is of


def _environments_of_the_dead(workspace: Path) -> Iterator[Path]:
    """Folders in which Prefect keeps a job's whole environment while the job runs.

    One stays, with every secret of that environment, where the job's worker is killed. The process
    that prepares a run has the folder in its command, and the engine, which it becomes, the run in
    its environment: the worker needs the folder when somebody cancels the run.
    """
    for manifest in temporary_root().glob("prefect-workspace-attempt-*/workspace.json"):
        try:
            is_own = manifest.parent.lstat().st_uid == os.getuid()
            content = read_json(manifest) if is_own else {}
        except (OSError, DataError):
            continue
        folder = content.get("working_directory")
        if folder and Path(folder).resolve() == workspace.resolve():
            import psutil

            run = (content.get("environment") or {}).get(RUN_VARIABLE)
            is_alive = False
            for process in psutil.process_iter(["cmdline", "environ"]):
                command = " ".join(process.info["cmdline"] or ())
                own_run = (process.info["environ"] or {}).get(RUN_VARIABLE)
                is_alive |= manifest.parent.name in command or (run is not None and own_run == run)
            if not is_alive:
                yield manifest.parent


def _locks_of_the_living(held: Mapping[str, Any]) -> dict[str, Any]:
    """DVC's table of locks without those of processes that have ended."""
    write = {path: holder for path, holder in held["write"].items() if start_token(holder["pid"])}
    read = {}
    for path, holders in held["read"].items():
        if living := [holder for holder in holders if start_token(holder["pid"])]:
            read[path] = living
    return {"write": write, "read": read}


if __name__ == "__main__":
    cleanup(Path(sys.argv[1]))

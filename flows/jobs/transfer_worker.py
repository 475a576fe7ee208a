"""Moves one stage between hosts through a DVC remote: its inputs one way, its result the other.

DVC's own ``push --run-cache`` sends the whole run cache and omits outputs that are not cached, and ``repro --pull``
computes what it does not find. Here the run-cache entry of one stage travels with all its objects, and nothing is
computed.

DVC is imported in a process of its own: ``python -m flows.jobs.transfer_worker COMMAND WORKSPACE STAGE REMOTE`` prints
``ANSWER {…}`` as its last line, with the fields of :class:`TransferAnswer`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ANSWER = "ANSWER "
EXIT_REFUSED = 2
# Options of a remote that another host needs and that are no secret; the others are set on each host.
PUBLIC_OPTIONS = ("url", "endpointurl", "region", "port", "user", "use_ssl", "account_name", "projectname")


@dataclass(frozen=True)
class TransferAnswer:
    """What a transfer came to; fields that a command does not set keep their defaults.

    Attributes:
        error: why it failed, empty if it did not.
        remote: name and public options of the remote.
        result_cached: whether the cache now holds the stage's result.
        carried_inputs: the inputs that DVC's cache does not keep and that must travel in another way.
    """

    error: str = ""
    remote: Mapping[str, str] = field(default_factory=dict)
    result_cached: bool = False
    carried_inputs: list[str] = field(default_factory=list)


class TransferRefused(Exception):
    """A transfer cannot succeed however often it is tried."""


class StageTransfer:
    """One stage of a workspace, and the DVC remote through which it is shared. Paths are relative to the workspace."""

    def __init__(self, workspace: Path, stage: str, remote: str) -> None:
        from dvc.repo import Repo

        self.repo = Repo(str(workspace), _wait_for_lock=True)
        self.workspace, self.remote = workspace, remote or None
        self.stage: Any = self.repo.stage.collect(stage)[0] if stage else None

    def describe_remote(self) -> TransferAnswer:
        """Return name and public options of the remote.

        Raises:
            TransferRefused: it is missing or of a kind that cannot serve two hosts.
        """
        name = self.remote or self.repo.config["core"].get("remote")
        remotes = self.repo.config["remote"]
        if name is None:
            raise TransferRefused("no DVC remote is set; make one with `dvc remote add -d NAME URL`")
        if name not in remotes:
            raise TransferRefused(f"there is no DVC remote {name}; make it with `dvc remote add {name} URL`")
        options = remotes[name]
        url = urlsplit(str(options["url"]))
        if url.password:
            raise TransferRefused(
                f"the URL of the DVC remote {name} holds a password, which the server would show; put it into "
                f"`dvc remote modify --local {name} password …` on each host"
            )
        if url.scheme in ("http", "https") or options.get("worktree") or options.get("version_aware"):
            raise TransferRefused(
                f"the DVC remote {name} ({options['url']}) keeps no run cache; use a folder, ssh or a bucket"
            )
        public = {key: str(options[key]) for key in PUBLIC_OPTIONS if key in options}
        return TransferAnswer(remote={"name": name, **public})

    def push_inputs(self) -> TransferAnswer:
        """Push the stage's inputs, unless its result is already in the cache or the remote."""
        remote = self.describe_remote().remote
        if self._has_result() or self.fetch_result().result_cached:
            return TransferAnswer(remote=remote, result_cached=True)
        cached, carried = self._inputs()
        if cached:
            self.repo.push(targets=cached, remote=self.remote)
        return TransferAnswer(remote=remote, carried_inputs=carried)

    def fetch_inputs(self) -> TransferAnswer:
        """Bring the stage's inputs into the workspace, and its result into the cache if the remote has it."""
        cached, _ = self._inputs()
        if cached:
            self.repo.fetch(targets=cached, remote=self.remote)
            self.repo.checkout(targets=cached, force=True)
        return TransferAnswer(result_cached=self._has_result() or self.fetch_result().result_cached)

    def push_result(self) -> TransferAnswer:
        """Push the stage's result: first all objects, then the run-cache entry that names them."""
        if not self._has_result():
            raise TransferRefused(f"the result of {self.stage.name} is not in the cache")
        folder, entries = self._run_cache_entries(self.repo.cache.legacy)
        self._transfer_objects(self.repo.cloud.push, folder, entries)
        self._copy_entries(self.repo.cache.legacy, self._remote_run_cache(), folder, entries)
        return TransferAnswer(result_cached=True)

    def fetch_result(self) -> TransferAnswer:
        """Fetch the stage's result into the cache if the remote has it."""
        remote = self._remote_run_cache()
        folder, entries = self._run_cache_entries(remote)
        if not entries:
            return TransferAnswer()
        self._copy_entries(remote, self.repo.cache.legacy, folder, entries)
        self._transfer_objects(self.repo.cloud.pull, folder, entries)
        return TransferAnswer(result_cached=self._has_result())

    def _inputs(self) -> tuple[list[str], list[str]]:
        """Return the inputs that DVC's cache keeps, and the files that must be carried in another way."""
        from dvc.dependency import ParamsDependency
        from dvc.exceptions import OutputNotFoundError

        cached: set[str] = set()
        carried: set[str] = set()
        for dep in self.stage.deps:
            try:
                outputs = self.repo.find_outs_by_path(dep.fs_path, recursive=True, strict=False)
            except OutputNotFoundError:
                outputs = []
            cached.update(self._relative(out.fs_path) for out in outputs if out.use_cache)
            carried.update(self._relative(out.stage.path) for out in outputs if out.stage.path.endswith(".dvc"))
            carried.update(self._relative(out.fs_path) for out in outputs if not out.use_cache)
            if isinstance(dep, ParamsDependency) or not outputs:
                carried.add(self._relative(dep.fs_path))
        return sorted(cached), sorted(carried)

    def _relative(self, path: str) -> str:
        relative = os.path.relpath(path, self.workspace)
        if relative.startswith(".."):
            raise TransferRefused(
                f"{self.stage.name} reads {path}, which is outside the workspace: `dvc add` a copy in it"
            )
        return relative

    def _has_result(self) -> bool:
        """Whether the cache holds what the stage makes of its inputs as they are in the workspace."""
        from dvc.stage.cache import RunCacheNotFoundError

        try:
            self.stage.save_deps()
            self.repo.stage_cache.restore(self.stage, dry=True)
        except RunCacheNotFoundError:
            return False
        return True

    def _run_cache_entries(self, odb: Any) -> tuple[str, list[str]]:
        """Return the folder of the stage in the run cache of ``odb``, and the names of the entries there."""
        from dvc.stage.cache import _get_stage_hash

        self.stage.save_deps()
        key = _get_stage_hash(self.stage)
        folder = odb.fs.join(odb.path, "runs", key[:2], key)
        files = odb.fs.find(folder) if odb.fs.exists(folder) else []
        return f"runs/{key[:2]}/{key}", [odb.fs.name(file) for file in files]

    def _remote_run_cache(self) -> Any:
        return self.repo.cloud.get_remote_odb(self.remote, hash_name="md5-dos2unix")

    def _copy_entries(self, source: Any, target: Any, folder: str, entries: Iterable[str]) -> None:
        from dvc_objects.fs import generic

        for entry in entries:
            source_path = source.fs.join(source.path, *folder.split("/"), entry)
            target_path = target.fs.join(target.path, *folder.split("/"), entry)
            generic.copy(source.fs, source_path, target.fs, target_path)

    def _transfer_objects(self, transfer: Callable[..., Any], folder: str, entries: Iterable[str]) -> None:
        """Push or pull all objects that the entries name; ``OSError`` if one fails."""
        key = folder.rsplit("/", 1)[-1]
        for objects in self.repo.stage_cache.get_used_objs([(key, entry) for entry in entries]).values():
            failed = transfer(objects, remote=self.remote).failed
            if failed:
                raise OSError(f"{len(failed)} objects could not be transferred")


COMMANDS: dict[str, Callable[[StageTransfer], TransferAnswer]] = {
    "describe-remote": StageTransfer.describe_remote,
    "push-inputs": StageTransfer.push_inputs,
    "fetch-inputs": StageTransfer.fetch_inputs,
    "push-result": StageTransfer.push_result,
    "fetch-result": StageTransfer.fetch_result,
}


class FirstErrorHandler(logging.Handler):
    """Keeps the first error that DVC logs: the exception it raises gives only a number of files."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.message = ""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.message = self.message or (str(error) if error else "")


def main(command: str, workspace: str, stage: str = "", remote: str = "") -> int:
    """Run ``command`` and print the answer.

    Returns:
        0; 2 for a failure that would only repeat itself, 1 for one that may not.
    """
    first_error = FirstErrorHandler()
    for name in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(name).addHandler(first_error)
    try:
        answer = COMMANDS[command](StageTransfer(Path(workspace), stage, remote))
        status = 0
    except TransferRefused as refusal:
        answer, status = TransferAnswer(error=str(refusal)), EXIT_REFUSED
    except Exception as error:  # DVC's exceptions have no common base class in its public interface
        message = " ".join((first_error.message or str(error)).split()) or type(error).__name__
        answer, status = TransferAnswer(error=message), 1
    print(ANSWER + json.dumps(asdict(answer)), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

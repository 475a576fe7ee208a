"""What goes through a DVC remote so that two hosts can share one stage: its inputs one way, its result the other.

DVC's own ``push --run-cache`` sends the whole run cache and leaves out what a stage does not cache, and ``repro
--pull`` computes where it finds nothing. Here one stage's entry goes with all of its objects, and nothing is computed.
DVC is imported in a process of its own: ``python -m flows.jobs.transfer_worker COMMAND WORKSPACE STAGE REMOTE`` ends
with a line ``ANSWER {…}``, in which ``error`` says what went wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ANSWER = "ANSWER "
# Options of a remote that another host needs and that are no secret; the rest belongs to each host's own DVC settings.
OPEN_OPTIONS = ("url", "endpointurl", "region", "port", "user", "use_ssl", "account_name", "projectname")


class Refused(Exception):
    """Something that stays wrong however often it is tried."""


class StageTransfer:
    """One stage of a workspace, and the remote it is shared through."""

    def __init__(self, workspace: Path, stage: str, remote: str) -> None:
        from dvc.repo import Repo

        self.repo = Repo(str(workspace), _wait_for_lock=True)
        self.workspace, self.remote = workspace, remote or None
        self.stage: Any = self.repo.stage.collect(stage)[0] if stage else None

    def describe(self) -> dict[str, Any]:
        """Name and open options of the remote; ``Refused`` where it is missing or cannot serve two hosts."""
        name = self.remote or self.repo.config["core"].get("remote")
        known = self.repo.config["remote"]
        if name is None:
            raise Refused("no DVC remote is set; make one with `dvc remote add -d NAME URL`")
        if name not in known:
            raise Refused(f"there is no DVC remote {name}; make it with `dvc remote add {name} URL`")
        options = known[name]
        parts = urlsplit(str(options["url"]))
        if parts.password:
            raise Refused(
                f"the URL of the DVC remote {name} holds a password, which the server would show; put it into "
                f"`dvc remote modify --local {name} password …` on each host"
            )
        if parts.scheme in ("http", "https") or options.get("worktree") or options.get("version_aware"):
            raise Refused(f"the DVC remote {name} ({options['url']}) keeps no run cache; use a folder, ssh or a bucket")
        return {"name": name, **{key: str(options[key]) for key in OPEN_OPTIONS if key in options}}

    def offer(self) -> dict[str, Any]:
        """Push the stage's inputs, unless the result is there already. ``carry`` are the inputs that DVC does not keep.

        ``{remote, done, carry}``: ``done`` when the result is in the cache, for which the remote was asked too.
        """
        remote = self.describe()
        if self._has_result() or self.bring()["found"]:
            return {"remote": remote, "done": True, "carry": []}
        kept, carried = self._inputs()
        if kept:
            self.repo.push(targets=kept, remote=self.remote)
        return {"remote": remote, "done": False, "carry": carried}

    def take(self) -> dict[str, Any]:
        """Bring the stage's inputs into the workspace, and its result into the cache if somebody has pushed one."""
        kept, _ = self._inputs()
        if kept:
            self.repo.fetch(targets=kept, remote=self.remote)
            self.repo.checkout(targets=kept, force=True)
        return {"found": self._has_result() or self.bring()["found"]}

    def give(self) -> dict[str, Any]:
        """Push the stage's result: first all objects, then the entry of the run cache that names them."""
        if not self._has_result():
            raise Refused(f"the result of {self.stage.name} is not in the cache")
        folder, entries = self._runs(self.repo.cache.legacy)
        self._move(self.repo.cloud.push, folder, entries)
        self._copy(self.repo.cache.legacy, self._remote_runs(), folder, entries)
        return {}

    def bring(self) -> dict[str, Any]:
        """Fetch the stage's result into the cache; ``found`` says whether the remote has it."""
        source = self._remote_runs()
        folder, entries = self._runs(source)
        if not entries:
            return {"found": False}
        self._copy(source, self.repo.cache.legacy, folder, entries)
        self._move(self.repo.cloud.pull, folder, entries)
        return {"found": self._has_result()}

    def _inputs(self) -> tuple[list[str], list[str]]:
        """Inputs that DVC's cache keeps, and files that must travel otherwise. Paths relative to the workspace."""
        from dvc.dependency import ParamsDependency
        from dvc.exceptions import OutputNotFoundError

        kept: set[str] = set()
        carried: set[str] = set()
        for dep in self.stage.deps:
            path = self._relative(dep.fs_path)
            try:
                owners = self.repo.find_outs_by_path(dep.fs_path, recursive=True, strict=False)
            except OutputNotFoundError:
                owners = []
            kept.update(self._relative(out.fs_path) for out in owners if out.use_cache)
            carried.update(self._relative(out.stage.path) for out in owners if out.stage.path.endswith(".dvc"))
            if isinstance(dep, ParamsDependency) or not owners:
                carried.add(path)
            carried.update(self._relative(out.fs_path) for out in owners if not out.use_cache)
        return sorted(kept), sorted(carried)

    def _relative(self, path: str) -> str:
        relative = os.path.relpath(path, self.workspace)
        if relative.startswith(".."):
            raise Refused(f"{self.stage.name} reads {path}, which is outside the workspace: `dvc add` a copy in it")
        return relative

    def _has_result(self) -> bool:
        """Whether the cache holds what the stage makes of its inputs as they lie here."""
        from dvc.stage.cache import RunCacheNotFoundError

        try:
            self.stage.save_deps()
            self.repo.stage_cache.restore(self.stage, dry=True)
        except RunCacheNotFoundError:
            return False
        return True

    def _runs(self, odb: Any) -> tuple[str, list[str]]:
        """Where the run cache keeps the stage, from the root of ``odb``, and the names of its entries there."""
        from dvc.stage.cache import _get_stage_hash

        self.stage.save_deps()
        key = _get_stage_hash(self.stage)
        folder = odb.fs.join(odb.path, "runs", key[:2], key)
        found = odb.fs.find(folder) if odb.fs.exists(folder) else []
        return f"runs/{key[:2]}/{key}", [odb.fs.name(file) for file in found]

    def _remote_runs(self) -> Any:
        return self.repo.cloud.get_remote_odb(self.remote, hash_name="md5-dos2unix")

    def _copy(self, source: Any, target: Any, folder: str, entries: Iterable[str]) -> None:
        from dvc_objects.fs import generic

        for entry in entries:
            place = target.fs.join(target.path, *folder.split("/"), entry)
            generic.copy(source.fs, source.fs.join(source.path, *folder.split("/"), entry), target.fs, place)

    def _move(self, transfer: Callable[..., Any], folder: str, entries: Iterable[str]) -> None:
        """Push or pull all objects that the entries name; ``OSError`` when one could not be."""
        key = folder.rsplit("/", 1)[-1]
        for objects in self.repo.stage_cache.get_used_objs([(key, entry) for entry in entries]).values():
            failed = transfer(objects, remote=self.remote).failed
            if failed:
                raise OSError(f"{len(failed)} objects could not be transferred")


class _Reasons(logging.Handler):
    """Remembers why DVC could not transfer something: it logs that, and raises no more than a number of files."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.first = self.first or (str(error) if error else "")


def main(command: str, workspace: str, stage: str = "", remote: str = "") -> int:
    """Do what ``command`` says and print the answer; status 2 for what stays wrong, 1 for what may be tried again."""
    reasons = _Reasons()
    for name in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(name).addHandler(reasons)
    try:
        answer = getattr(StageTransfer(Path(workspace), stage, remote), command)()
        status = 0
    except Refused as refusal:
        answer, status = {"error": str(refusal)}, 2
    except Exception as error:  # DVC's exceptions have no common base that is part of its interface
        answer, status = {"error": " ".join((reasons.first or str(error)).split()) or type(error).__name__}, 1
    print(ANSWER + json.dumps(answer), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

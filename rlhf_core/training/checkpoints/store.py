"""Partial state that outlives its machine: after every checkpoint a stage's ``work`` folder is copied to a store.

The store is a folder or anything that fsspec reaches. A stage's state lies under ``STORE/STAGE/KEY``: file contents
under ``files/SHA256``, and for each checkpoint a manifest ``step-000123.json``, written last, that names every file of
the ``work`` folder with its hash. What no manifest names does not count, so an upload that broke off changes nothing.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_core.errors import CheckpointError, RlhfError
from rlhf_core.files import atomic_dir, sha256_file
from rlhf_core.training.checkpoints.location import Place

logger = logging.getLogger(__name__)

MANIFEST = re.compile(r"step-(\d{6,})\.json")
FILES = "files"
# Of a save under way, or known to be broken: no part of the state.
UNFINISHED = (".", "broken-")


@dataclass
class CheckpointStore:
    """The partial state of one computation (a stage with its key) at ``place``. ``failures`` counts lost uploads."""

    place: Place
    failures: int = 0
    _known: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def publish(self, work: Path, step: int, keep: int) -> None:
        """Upload the state after ``step`` steps, then drop all but the newest ``keep`` and any of a later step.

        A failure is reported and counted; training does not depend on the store.
        """
        try:
            self._upload(work, step)
            self._prune(step, keep)
        except Exception as error:
            self.failures += 1
            logger.warning(
                "the checkpoint of step %d did not reach %s (%s; failed uploads so far: %d); training goes on, and the "
                "next checkpoint is uploaded with all that is missing",
                step, self.place, reason(error), self.failures,
            )  # fmt: skip

    def _upload(self, work: Path, step: int) -> None:
        there = self.place.sizes(FILES)
        table = {}
        for path in state_files(work):
            digest, size = self._digest(path), path.stat().st_size
            if there.get(digest) != size:
                self.place.put(path, f"{FILES}/{digest}")
            table[path.relative_to(work).as_posix()] = {"sha256": digest, "size": size}
        self.place.write(f"step-{step:06d}.json", json.dumps({"step": step, "files": table}, indent=1).encode())

    def _digest(self, path: Path) -> str:
        status = path.stat()
        mark = (str(path), status.st_size, status.st_mtime_ns)
        if mark not in self._known:
            self._known[mark] = sha256_file(path)
        return self._known[mark]

    def _prune(self, step: int, keep: int) -> None:
        """Drop manifests, then what only they named. Contents that nobody names may be of an upload under way."""
        steps = self._steps()
        older = [number for number in steps if number < step]
        dropped = {number for number in steps if number > step} | set(older[: max(len(older) - keep + 1, 0)])
        contents = {number: self._named(number) for number in steps} if dropped else {}
        kept = set().union(*(contents[number] for number in steps if number not in dropped and dropped))
        for number in sorted(dropped):
            self.place.remove(f"step-{number:06d}.json")
            for digest in contents[number] - kept:
                self.place.remove(f"{FILES}/{digest}")

    def _named(self, step: int) -> set[str]:
        try:
            return {entry["sha256"] for entry in self._manifest(step).values()}
        except CheckpointError:
            return set()

    def fetch(self, work: Path, beyond: int) -> int | None:
        """Put the newest sound state into ``work`` if it is of a later step than ``beyond``; that step, else None.

        A state that is incomplete, or whose files do not have their hashes, is reported and passed over. ``work`` is
        replaced as a whole or left alone.
        """
        for step in reversed(self._steps()):
            if step <= beyond:
                return None
            try:
                with atomic_dir(work) as building:
                    for name, entry in self._manifest(step).items():
                        self._take(name, entry, building)
            except CheckpointError as error:
                logger.warning("%s; the one before it is tried", error)
                continue
            except Exception as error:
                raise _unreachable(self.place, error) from error
            logger.warning("the state after step %d was fetched from %s", step, self.place)
            return step
        return None

    def _take(self, name: str, entry: Mapping[str, Any], building: Path) -> None:
        target = building / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.place.get(f"{FILES}/{entry['sha256']}", target)
        except FileNotFoundError as error:
            raise CheckpointError(f"the checkpoint in {self.place} is incomplete: {name} is missing") from error
        if sha256_file(target) != entry["sha256"]:
            raise CheckpointError(f"the checkpoint in {self.place} is broken: {name} does not have its sha256")

    def clear(self) -> None:
        """Remove everything: the computation is finished, and its result is where results go."""
        try:
            self.place.remove_all()
        except Exception as error:
            logger.warning("the partial state of a finished stage is left in %s (%s)", self.place, reason(error))

    def _steps(self) -> list[int]:
        return sorted(int(match[1]) for name in self.place.sizes() if (match := MANIFEST.fullmatch(name)))

    def _manifest(self, step: int) -> dict[str, dict[str, Any]]:
        """The files of a state by name; ``CheckpointError`` if the manifest is not one."""
        name = f"step-{step:06d}.json"
        try:
            table = json.loads(self.place.read(name))["files"]
            if not all(_is_inside(file) and re.fullmatch("[0-9a-f]{64}", e["sha256"]) for file, e in table.items()):
                raise ValueError("it names files that are not of a checkpoint")
            return dict(table)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name} in {self.place} is broken ({reason(error)})") from error


def _unreachable(place: Place, error: Exception) -> RlhfError:
    # Exit code 1, as after a crash: another attempt may reach the store.
    return RlhfError(f"the state in {place} could not be fetched ({reason(error)}); run the stage again", exit_code=1)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def state_files(work: Path) -> list[Path]:
    """What belongs to the partial state in ``work``."""
    return [
        path
        for path in sorted(work.rglob("*"))
        if path.is_file() and not any(part.startswith(UNFINISHED) for part in path.relative_to(work).parts)
    ]


def reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def open_store(url: str, workspace: Path, *parts: str) -> CheckpointStore:
    """The store at ``url`` (a folder counts from ``workspace``) for the computation ``parts`` (stage and key).

    ``CheckpointError`` in one line when it cannot be written: an unknown scheme, a missing package, credentials.
    """
    place = Place.at(url, workspace, *parts)
    probe = f".probe-{uuid.uuid4().hex}"
    try:
        place.write(probe, b"")
        place.remove(probe)
    except Exception as error:
        raise CheckpointError(
            f"checkpoints.store {url} cannot be used ({reason(error)}); check the address and the credentials in the "
            "environment, or set it to null"
        ) from error
    return CheckpointStore(place)

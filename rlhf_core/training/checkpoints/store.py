"""The checkpoint store, to which every checkpoint is copied to survive its machine.

The store is a folder or any fsspec URL. The state of a stage lies under ``STORE/STAGE/KEY``: file
contents under ``files/SHA256``, and for each checkpoint a manifest ``step-000123.json``, written
last, that names every file of the ``work`` folder with its hash. Files that no manifest names do
not count, so that an interrupted upload changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import posixpath
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.errors import CheckpointError, RlhfError, named_line
from rlhf_core.storage.files import atomic_dir, sha256_file

logger = logging.getLogger(__name__)

MANIFEST = re.compile(r"step-(\d{6,})\.json")
FILES = "files"
WEIGHTS = ".safetensors"  # written once and never changed
# Names of files that a save is still writing or that are damaged: not part of the state.
UNFINISHED = (".", "broken-")
# File systems whose folders must be created. Object stores have none, and would create a bucket.
WITH_FOLDERS = frozenset(
    {"file", "local", "memory", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs", "dir"}
)
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


@dataclass
class CheckpointStore:
    """The partial state of one computation, a stage with its key, in an fsspec folder.

    The folder is ``root`` of the file system ``fs``. Names are relative to it, with slashes;
    ``failures`` counts failed uploads.
    """

    fs: Any
    root: str
    failures: int = 0
    _known: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.root))

    def path(self, name: str) -> str:
        """A name on the file system."""
        return posixpath.join(self.root, name)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Sizes by name of the files directly in ``folder``."""
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(self.path(folder).rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {
            posixpath.basename(e["name"]): int(e["size"]) for e in entries if e["type"] == "file"
        }

    def put(self, path: Path, name: str) -> None:
        """Upload a local file; ``OSError`` unless all bytes arrived."""
        with self._replacing(name) as target:
            self.fs.put_file(str(path), target)
            arrived = self.fs.info(target)["size"]
            if arrived != path.stat().st_size:
                raise OSError(f"{arrived} of {path.stat().st_size} bytes of {path.name} arrived")

    def write(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        with self._replacing(name) as target:
            self.fs.pipe_file(target, content)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Any:
        """Yield the path to write ``name`` to.

        An object appears when it is complete; a file is renamed then.
        """
        path = self.path(name)
        protocols = (
            {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        )
        if not protocols & WITH_FOLDERS:
            yield path
            return
        self.fs.makedirs(posixpath.dirname(path), exist_ok=True)
        part = f"{posixpath.dirname(path)}/.part-{os.getpid()}-{posixpath.basename(name)}"
        try:
            yield part
            (os.replace if protocols & {"file", "local"} else self.fs.mv)(part, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.fs.rm_file(part)
            raise

    def remove(self, name: str) -> None:
        """Delete one file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def publish(self, work: Path, step: int, keep: int) -> None:
        """Upload the state after ``step`` steps, and delete outdated ones.

        All but the newest ``keep`` and those of later steps go.

        A failed upload is logged and counted; training goes on without the store.
        """
        try:
            self._upload(work, step)
            self._prune(step, keep)
        except Exception as error:
            self.failures += 1
            logger.warning(
                "the checkpoint of step %d did not reach %s (%s; failed uploads so far: %d); training goes on, and the "
                "next checkpoint is uploaded with all that is missing",
                step, self, named_line(error), self.failures,
            )  # fmt: skip

    def _upload(self, work: Path, step: int) -> None:
        stored = self.sizes(FILES)
        table = {}
        for path in state_files(work):
            digest, size = self._uploaded(path, stored)
            table[path.relative_to(work).as_posix()] = {"sha256": digest, "size": size}
        self.write(
            f"step-{step:06d}.json", json.dumps({"step": step, "files": table}, indent=1).encode()
        )

    def _uploaded(self, path: Path, stored: Mapping[str, int]) -> tuple[str, int]:
        """Digest and size of a file that is in the store now."""
        if path.suffix == WEIGHTS:
            digest, size = self._digest(path), path.stat().st_size
            if stored.get(digest) != size:
                self.put(path, f"{FILES}/{digest}")
            return digest, size
        # Training goes on and may write lines meanwhile: what is hashed must be what is uploaded.
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if stored.get(digest) != len(content):
            self.write(f"{FILES}/{digest}", content)
        return digest, len(content)

    def _digest(self, path: Path) -> str:
        status = path.stat()
        mark = (str(path), status.st_size, status.st_mtime_ns)
        if mark not in self._known:
            self._known[mark] = sha256_file(path)
        return self._known[mark]

    def _prune(self, step: int, keep: int) -> None:
        """Delete manifests, then files that only they named.

        Files of no manifest may be of an unfinished upload.
        """
        steps = self._steps()
        older = [number for number in steps if number < step]
        dropped = {number for number in steps if number > step} | set(
            older[: max(len(older) - keep + 1, 0)]
        )
        if not dropped:
            return
        contents = {number: self._named(number) for number in steps}
        kept = set().union(*(contents[number] for number in steps if number not in dropped))
        for number in sorted(dropped):
            self.remove(f"step-{number:06d}.json")
            for digest in contents[number] - kept:
                self.remove(f"{FILES}/{digest}")

    def _named(self, step: int) -> set[str]:
        try:
            return {entry["sha256"] for entry in self._manifest(step).values()}
        except CheckpointError:
            return set()

    def fetch(self, work: Path, beyond: int) -> int | None:
        """Download the newest valid state into ``work`` if its step is above ``beyond``.

        A state that is incomplete or damaged is reported and skipped. ``work`` is replaced as a
        whole or not at all.

        Returns:
            The step of the state, or None if nothing was downloaded.
        """
        for step in reversed(self._steps()):
            if step <= beyond:
                return None
            try:
                with atomic_dir(work) as building:
                    for name, entry in self._manifest(step).items():
                        self._download(name, entry, building)
            except CheckpointError as error:
                logger.warning("%s; the one before it is tried", error)
                continue
            except Exception as error:
                # Exit code 1, as after a crash: another attempt may reach the store.
                raise RlhfError(
                    f"the state in {self} could not be fetched ({named_line(error)}); run the stage again",
                    exit_code=1,
                ) from error
            logger.warning("the state after step %d was fetched from %s", step, self)
            return step
        return None

    def _download(self, name: str, entry: Mapping[str, Any], building: Path) -> None:
        target = building / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.fs.get_file(self.path(f"{FILES}/{entry['sha256']}"), str(target))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the checkpoint in {self} is incomplete: {name} is missing"
            ) from error
        if sha256_file(target) != entry["sha256"]:
            raise CheckpointError(
                f"the checkpoint in {self} is broken: {name} does not have its sha256"
            )

    def clear(self) -> None:
        """Delete the partial state of a finished computation."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm(self.root, recursive=True)
        except Exception as error:
            logger.warning(
                "the partial state of a finished stage is left in %s (%s)", self, named_line(error)
            )

    def _steps(self) -> list[int]:
        return sorted(int(match[1]) for name in self.sizes() if (match := MANIFEST.fullmatch(name)))

    def _manifest(self, step: int) -> dict[str, dict[str, Any]]:
        """The files of a state by name; ``CheckpointError`` if the manifest is damaged."""
        name = f"step-{step:06d}.json"
        try:
            table = json.loads(self.fs.cat_file(self.path(name)))["files"]
            inside = all(
                posixpath.normpath(file) == file and file[:1] not in "./" for file in table
            )
            if not inside or not all(
                re.fullmatch("[0-9a-f]{64}", entry["sha256"]) for entry in table.values()
            ):
                raise ValueError("it names files that are not of a checkpoint")
            return dict(table)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name} in {self} is broken ({named_line(error)})") from error


def state_files(work: Path) -> list[Path]:
    """Files of the partial state in ``work``."""
    files = []
    for path in sorted(work.rglob("*")):
        parts = path.relative_to(work).parts
        if path.is_file() and not any(part.startswith(UNFINISHED) for part in parts):
            files.append(path)
    return files


def open_store(url: str, workspace: Path, *parts: str) -> CheckpointStore:
    """Open the store at ``url`` for one computation.

    Args:
        url: A folder, relative to ``workspace``, or an fsspec URL.
        parts: Stage and key of the computation.

    Raises:
        CheckpointError: Its scheme is unknown, it needs a package that is not installed, or it
            cannot be written.
    """
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(
            url if "://" in url else str((workspace / Path(url).expanduser()).resolve())
        )
    except ImportError as error:
        extra = EXTRAS.get(url.partition("://")[0])
        install = f"pip install 'rlhf-pipeline[{extra}]'" if extra else str(error)
        raise CheckpointError(
            f"checkpoints.store {url} needs a package that is missing: {install}"
        ) from error
    except Exception as error:
        raise CheckpointError(f"checkpoints.store {url} cannot be used: {error}") from error
    store = CheckpointStore(fs, posixpath.join(root, *parts))
    probe = f".probe-{uuid.uuid4().hex}"
    try:
        store.write(probe, b"")
        store.remove(probe)
    except Exception as error:
        raise CheckpointError(
            f"checkpoints.store {url} cannot be used ({named_line(error)}); check the address and the credentials in "
            "the environment, or set it to null"
        ) from error
    return store

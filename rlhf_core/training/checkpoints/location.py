"""A folder of a checkpoint store, local or remote, with the operations that a store needs."""

from __future__ import annotations

import contextlib
import os
import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import CheckpointError

# File systems whose folders must be created. Object stores have none, and would create a bucket.
WITH_FOLDERS = frozenset({"file", "local", "memory", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs", "dir"})
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


@dataclass(frozen=True)
class StoreLocation:
    """``root`` on the fsspec file system ``fs``. Names are relative to it, with slashes."""

    fs: Any
    root: str

    @classmethod
    def at(cls, url: str, workspace: Path, *parts: str) -> StoreLocation:
        """Locate the folder ``parts`` under ``url``.

        Raises:
            CheckpointError: The scheme is unknown, or needs a package that is not installed.
        """
        from fsspec.core import url_to_fs

        try:
            fs, root = url_to_fs(url if "://" in url else str((workspace / Path(url).expanduser()).resolve()))
        except ImportError as error:
            extra = EXTRAS.get(url.partition("://")[0])
            install = f"pip install 'rlhf-pipeline[{extra}]'" if extra else str(error)
            raise CheckpointError(f"checkpoints.store {url} needs a package that is missing: {install}") from error
        except Exception as error:
            raise CheckpointError(f"checkpoints.store {url} cannot be used: {error}") from error
        return cls(fs, posixpath.join(root, *parts))

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.root))

    def _path(self, name: str) -> str:
        return posixpath.join(self.root, name)

    @property
    def _protocols(self) -> set[str]:
        return {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Sizes by name of the files directly in ``folder``."""
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(self._path(folder).rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {posixpath.basename(e["name"]): int(e["size"]) for e in entries if e["type"] == "file"}

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
        """Yield the path to write ``name`` to. An object appears when it is complete; a file is renamed then."""
        path = self._path(name)
        if not self._protocols & WITH_FOLDERS:
            yield path
            return
        self.fs.makedirs(posixpath.dirname(path), exist_ok=True)
        part = f"{posixpath.dirname(path)}/.part-{os.getpid()}-{posixpath.basename(name)}"
        try:
            yield part
            self._rename(part, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.fs.rm_file(part)
            raise

    def _rename(self, part: str, path: str) -> None:
        if self._protocols & {"file", "local"}:
            os.replace(part, path)
        else:
            self.fs.mv(part, path)

    def get(self, name: str, target: Path) -> None:
        """Download a file; ``FileNotFoundError`` if there is none."""
        self.fs.get_file(self._path(name), str(target))

    def read(self, name: str) -> bytes:
        """Read a small file; ``FileNotFoundError`` if there is none."""
        content: bytes = self.fs.cat_file(self._path(name))
        return content

    def remove(self, name: str) -> None:
        """Delete one file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def remove_all(self) -> None:
        """Delete the folder and everything in it."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.root, recursive=True)

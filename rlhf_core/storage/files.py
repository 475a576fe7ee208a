"""Files: atomic writes (a reader sees the old content or the new, never half of either), hashes, locks, JSON."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rlhf_core.errors import DataError, RlhfError, is_full_disk


def permitted(mode: int) -> int:
    """``mode`` without what this process's umask takes away: temporary files begin private, and end as others do."""
    try:
        umask = re.search(r"^Umask:\s+(\d+)$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        umask = None
    # Elsewhere than on Linux it can only be asked for by setting it, which other threads would see.
    return mode & ~int(umask[1], 8) if umask else mode


def atomic_write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write ``text`` (UTF-8) to a neighbour of ``path``, flush it to disk, then rename it over ``path``.

    Nobody sees it with other permissions than ``mode``, less what the umask takes away.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, permitted(mode))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _unwritable(path: Path, error: OSError) -> RlhfError:
    remedy = "make room" if is_full_disk(error) else "make the folder writable"
    return RlhfError(f"cannot write {path}: {error.strerror}; {remedy} or choose another")


def atomic_write_json(path: Path, value: Any) -> None:
    """Write ``value`` as sorted, indented JSON. Non-finite numbers are refused (``ValueError``)."""
    atomic_write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n")


def atomic_write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write ``rows`` as JSON lines. Non-finite numbers are refused (``ValueError``)."""
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def split_json_lines(text: str) -> list[str]:
    """Return the lines of a file of JSON lines.

    Only a line feed ends a line. ``str.splitlines`` also splits at U+0085, U+2028 and U+2029, which stand unescaped in
    JSON strings.
    """
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path`` that takes the place of ``path`` when the block ends without an error."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield temporary
        temporary.chmod(permitted(0o755))
        _replace_dir(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace_dir(new: Path, path: Path) -> None:
    """A folder cannot be renamed over a full one, so the old one steps aside first."""
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


def read_json(path: Path) -> Any:
    """The JSON value in ``path``; ``DataError`` when the file is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; run the stage that writes it") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); delete it and run its stage again") from error


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; every key gets ``prefix`` before it."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class LockFile:
    """An advisory lock on a file (flock). The kernel releases it when the process dies, however it dies.

    Entering opens the file and leaves it unlocked; closing releases it. A child that inherits the descriptor holds the
    lock too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> LockFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.stream: IO[str] = self.path.open("a+", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()

    def acquire(self) -> None:
        """Wait until the lock is held."""
        fcntl.flock(self.stream, fcntl.LOCK_EX)

    def try_acquire(self) -> bool:
        """Take the lock if that needs no waiting; whether it is held now."""
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def fsync_path(path: Path) -> None:
    """Bring a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class FileHashes:
    """Hashes of files' contents, remembered in a JSON file by size, times and inode, so that each is read once."""

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self.known: dict[str, list[Any]] = read_json(memory) if memory.exists() else {}
        self.fresh: dict[str, list[Any]] = {}

    def of(self, file: Path) -> str:
        """Hex digest of a file's content; ``FileNotFoundError`` where there is none."""
        status = file.stat()
        mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        old = self.known.get(str(file))
        self.fresh[str(file)] = old if old and old[:-1] == mark else [*mark, sha256_file(file)]
        return str(self.fresh[str(file)][-1])

    def save(self) -> None:
        """Remember the hashes that were asked for, and no others."""
        if self.fresh != self.known:
            atomic_write_text(self.memory, json.dumps(self.fresh, indent=1))
            self.known = self.fresh


def sha256_tree(path: Path) -> str:
    """Hex digest of a file, or of a folder's relative file names and contents in sorted order."""
    path = Path(path)
    if path.is_file():
        return sha256_file(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_file(file)}\n".encode())
    return digest.hexdigest()

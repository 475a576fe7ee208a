"""Files: atomic writes (a reader sees the old content or the new, never half of either), temporary
ones, locks, JSON.

Whatever is locked or temporary is opened here alone. In a folder that others can write to, as the
one for temporary files, another user may have put a link at a name that can be guessed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlhf_core.errors import DataError, RlhfError, is_full_disk


def permitted(mode: int) -> int:
    """``mode`` without what this process's umask takes away: temporary files begin private, and end
    as others do.
    """
    try:
        umask = re.search(
            r"^Umask:\s+(\d+)$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        umask = None
    # Elsewhere than on Linux it can only be asked for by setting it, which other threads would see.
    return mode & ~int(umask[1], 8) if umask else mode


def own_temporary_folder() -> Path:
    """The folder ``rlhf-UID`` for temporary files whose names others must find, which this user
    alone can enter.

    Raises:
        RlhfError: Somebody else made it or can write to it, or it cannot be made.
    """
    folder = temporary_root() / f"rlhf-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        is_own = (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and not found.st_mode & 0o022
        )
        if is_own and found.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not is_own:
        raise RlhfError(
            f"{folder} is not a folder that this user alone can write to, so somebody else may have put files into it: "
            "remove it, or name another folder in the environment variable TMPDIR"
        )
    return folder


def temporary_root() -> Path:
    """The folder for temporary files of all users: that of the environment variable TMPDIR, or the
    system's.
    """
    return Path(tempfile.gettempdir())


@contextmanager
def scratch_folder(prefix: str = "rlhf-", within: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that this user alone can enter, and that goes with the block.

    Args:
        prefix: Of its name.
        within: Where it is made; None for the folder for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as folder:
        yield Path(folder)


def new_scratch_folder(prefix: str) -> Path:
    """A new folder for temporary files that this user alone can enter, and that the caller
    removes.
    """
    return Path(tempfile.mkdtemp(prefix=prefix))


@contextmanager
def scratch_file(prefix: str) -> Iterator[IO[bytes]]:
    """Yield a new file that this user alone can read, with a ``name``, and that goes with the
    block.
    """
    with tempfile.NamedTemporaryFile(prefix=prefix) as stream:
        yield stream


def new_part(path: Path) -> Path:
    """A new, empty neighbour of ``path`` that this user alone can read, to be renamed over it;
    ``OSError`` if not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    return Path(name)


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a new neighbour of ``path`` that takes its place when the block ends without an
    error.
    """
    part = new_part(path)
    try:
        yield part
        os.chmod(part, permitted(mode))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write ``text`` (UTF-8) to a neighbour of ``path``, flush it to disk, then rename it over
    ``path``.

    Nobody sees it with other permissions than ``mode``, less what the umask takes away.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".part"
        )
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
    atomic_write_text(
        path,
        json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n",
    )


def atomic_write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write ``rows`` as JSON lines. Non-finite numbers are refused (``ValueError``)."""
    atomic_write_text(
        path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    )


def split_json_lines(text: str) -> list[str]:
    """Return the lines of a file of JSON lines.

    Only a line feed ends a line. ``str.splitlines`` also splits at U+0085, U+2028 and U+2029, which
    stand unescaped in JSON strings.
    """
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path`` that takes the place of ``path`` when the block ends
    without an error.
    """
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


UNFINISHED = ".rlhf-unfinished"


@contextmanager
def filled_dir(path: Path) -> Iterator[Path]:
    """Yield a folder whose entries are in ``path`` when the block ends without an error.

    ``path`` exists and is empty, and stays the folder that it is: it may be a mount point, the end
    of a link, or the current folder of a shell. What a process leaves that is killed meanwhile,
    :func:`clear_unfinished` takes away.
    """
    hidden = path / UNFINISHED
    content = hidden / "content"
    try:
        content.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with LockFile(hidden / "lock") as lock:
            lock.try_acquire()
            yield content
            names = sorted(entry.name for entry in content.iterdir())
            atomic_write_json(hidden / "names.json", names)
            for name in names:
                os.rename(content / name, path / name)
    except BaseException:
        clear_unfinished(path)
        raise
    shutil.rmtree(hidden, ignore_errors=True)


def clear_unfinished(path: Path) -> None:
    """Take away what a killed :func:`filled_dir` left in ``path``, and nothing else.

    Raises:
        RlhfError: It is not killed but at work.
    """
    hidden = path / UNFINISHED
    if hidden.is_symlink() or not hidden.is_dir():
        return
    with LockFile(hidden / "lock") as lock:
        if not lock.try_acquire():
            raise RlhfError(
                f"another process is writing into {path}; wait for it, or name another folder"
            )
        names = read_json(hidden / "names.json") if (hidden / "names.json").is_file() else []
        for name in names:
            if not (hidden / "content" / name).exists():
                moved = path / name
                shutil.rmtree(moved) if moved.is_dir() else moved.unlink(missing_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)


REMOVED = ".removed"


def removed_name(path: Path) -> Path:
    """Where :func:`remove_tree` puts a folder while it is deleted."""
    return path.with_name(f".{path.name}{REMOVED}")


def remove_tree(path: Path) -> None:
    """Delete a folder so that readers see all of it or nothing, whenever this process is killed.

    It gets another name first. What a killed process left under that name is deleted too, and what
    cannot be deleted stays there until the next call.

    Raises:
        OSError: It cannot be renamed, and is as it was.
    """
    aside = removed_name(path)
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def read_json(path: Path) -> Any:
    """The JSON value in ``path``; ``DataError`` when the file is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; run the stage that writes it") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}); delete it and run its stage again"
        ) from error


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
    """An advisory lock on a file (flock). The kernel releases it when the process dies, however it
    dies.

    Entering opens the file and leaves it unlocked; closing releases it. A child that inherits the
    descriptor holds the lock too. A link in the file's place is refused with ``OSError``: what it
    points to would be written over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> LockFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.stream: IO[str] = open(self.path, "a+", encoding="utf-8", opener=_open_no_link)
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


def _open_no_link(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP, "a link is in the place of this lock file; remove it", path
        ) from error


LITTLE_ROOM = 2**26  # bytes


def full_disks(*folders: Path) -> str:
    """Return what a message adds about disks of ``folders`` that are almost full; empty if none
    is.
    """
    said: dict[int, str] = {}
    for folder in folders:
        try:
            usage, device = os.statvfs(folder), folder.stat().st_dev
        except OSError:
            continue
        room = usage.f_bavail * usage.f_frsize
        if room < LITTLE_ROOM or (usage.f_files and not usage.f_favail):
            said.setdefault(
                device, f"{folder} has room for {room / 2**20:.0f} MiB and {usage.f_favail} files"
            )
    return f" (the disk of {', that of '.join(said.values())})" if said else ""


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
    """Hashes of files' contents, remembered in a JSON file by size, times and inode, so that each
    is read once.
    """

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self.known: dict[str, list[Any]] = {}
        with suppress(
            DataError
        ):  # a memory that is missing or damaged costs one reading of each file
            self.known = read_json(memory)
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

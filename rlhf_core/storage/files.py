"""Files: atomic writes, temporary files, locks, hashes and JSON.

After an atomic write, a reader sees the old content or the new, never half of either.

Only this file opens what is locked or temporary. In a folder that others can write to, such as the
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlhf_core.errors import (
    MORE_FILES,
    DataError,
    RlhfError,
    first_line,
    is_full_disk,
    is_out_of_files,
)


def permitted(mode: int) -> int:
    """Return ``mode`` without what this process's umask takes away.

    Temporary files begin private, and end with the permissions of other files.
    """
    # Only Linux tells the umask without setting it, which other threads would see.
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        umask = re.search(r"^Umask:\s+(\d+)$", status, re.MULTILINE)
        if umask:
            return mode & ~int(umask[1], 8)
    return mode


def own_temporary_folder() -> Path:
    """Return the folder ``rlhf-UID`` for temporary files that others must find by name.

    Only this user can enter it.

    Raises:
        RlhfError: Somebody else made it or can write to it, or it cannot be made.
    """
    folder = temporary_root() / f"rlhf-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        is_own = is_own and not found.st_mode & 0o022
        if is_own and found.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise unwritable(folder, error) from error
    if not is_own:
        raise RlhfError(
            f"{folder} is not a folder that this user alone can write to, so somebody else may have put files into it: "
            "remove it, or name another folder in the environment variable TMPDIR"
        )
    return folder


def temporary_root() -> Path:
    """Return the folder for temporary files of all users: ``TMPDIR``, or the system's."""
    return Path(tempfile.gettempdir())


@contextmanager
def scratch_folder(prefix: str = "rlhf-", within: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that only this user can enter, and that is removed after the block.

    Args:
        prefix: The beginning of its name.
        within: The folder that it is made in; None for the folder for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as folder:
        yield Path(folder)


def new_scratch_folder(prefix: str) -> Path:
    """Make a temporary folder that only this user can enter, and that the caller removes."""
    return Path(tempfile.mkdtemp(prefix=prefix))


@contextmanager
def scratch_file(prefix: str) -> Iterator[IO[bytes]]:
    """Yield a new file with a ``name`` that only this user can read, removed after the block."""
    with tempfile.NamedTemporaryFile(prefix=prefix) as stream:
        yield stream


def new_part(path: Path) -> Path:
    """Make an empty neighbour of ``path`` that only this user can read, to be renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    return Path(name)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let the error of a disk that is full, or of a file too large, name ``path``.

    What fails within a write, or in a library, often names no file.
    """
    try:
        yield
    except Exception as error:
        if not is_full_disk(error) or getattr(error, "filename", None) is not None:
            raise
        number = getattr(error, "errno", None) or errno.ENOSPC
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a new neighbour of ``path`` that takes its place if the block ends without an error."""
    part = new_part(path)
    try:
        with naming(path):
            yield part
        os.chmod(part, permitted(mode))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write ``text`` (UTF-8) to a neighbour of ``path``, flush it, and rename it over ``path``.

    Nobody sees it with other permissions than ``mode``, less what the umask takes away.
    """
    with ExitStack() as stack:
        try:
            part = stack.enter_context(replacing(Path(path), mode))
        except OSError as error:
            raise unwritable(path, error) from error
        with part.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())


def unwritable(path: Path, error: OSError, kind: type[RlhfError] = RlhfError) -> RlhfError:
    """The error for users that ``path`` cannot be written; ``kind`` is its class."""
    remedy = "make the folder writable or choose another"
    if is_full_disk(error):
        remedy = "make room or choose another"
    if is_out_of_files(error):
        remedy = MORE_FILES
    return kind(f"cannot write {path}: {error.strerror or first_line(error)}; {remedy}")


def atomic_write_json(path: Path, value: Any) -> None:
    """Write ``value`` as sorted, indented JSON. Non-finite numbers are refused (``ValueError``)."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    atomic_write_text(path, text + "\n")


def atomic_write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write ``rows`` as JSON lines. Non-finite numbers are refused (``ValueError``)."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    atomic_write_text(path, "".join(f"{line}\n" for line in lines))


def split_json_lines(text: str) -> list[str]:
    """Return the lines of a file of JSON lines.

    Only a line feed ends a line. ``str.splitlines`` also splits at U+0085, U+2028 and U+2029, which
    stand unescaped in JSON strings.
    """
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``path`` if the block ends without an error."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with naming(path):
            yield temporary
        temporary.chmod(permitted(0o755))
        _replace_dir(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace_dir(new: Path, path: Path) -> None:
    """Move the old folder aside first: a folder cannot be renamed over a full one."""
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


UNFINISHED = ".rlhf-unfinished"


@contextmanager
def filled_dir(path: Path) -> Iterator[Path]:
    """Yield a folder whose entries are in ``path`` once the block ends without an error.

    ``path`` exists and is empty, and stays the same folder: it may be a mount point, the end of a
    link, or the current folder of a shell. If the process is killed meanwhile,
    :func:`clear_unfinished` removes what it left.
    """
    hidden = path / UNFINISHED
    content = hidden / "content"
    try:
        content.mkdir(parents=True)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with LockFile(hidden / "lock") as lock:
            lock.try_acquire()
            with naming(path):
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
    """Remove what a killed :func:`filled_dir` left in ``path``, and nothing else.

    Raises:
        RlhfError: The process that fills the folder still runs.
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
    """Return the name that :func:`remove_tree` gives a folder while it is deleted."""
    return path.with_name(f".{path.name}{REMOVED}")


def remove_tree(path: Path) -> None:
    """Delete a folder so that readers see all of it or nothing, whenever this process is killed.

    It gets another name first. What a killed process left under that name is deleted, too. What
    cannot be deleted stays there until the next call. Of a link, what it leads to stays.

    Raises:
        OSError: It cannot be renamed, and stays as it was.
    """
    if path.is_symlink():
        path.unlink()
        return
    aside = removed_name(path)
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def read_json(path: Path) -> Any:
    """Return the JSON value in ``path``; ``DataError`` if the file is missing or not JSON."""
    path = Path(path)
    # A pipe would be waited for, and a device read without end.
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no file; remove it and run the stage that writes it")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; run the stage that writes it") from error
    # Also of numbers with too many digits, and of values too deep within others.
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}); delete it and run its stage again"
        ) from error


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"a": {"b": 1}}`` as ``{"a.b": 1}``, with ``prefix`` before every key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class LockFile:
    """An advisory lock on a file (flock), which the kernel releases when the process dies.

    Entering the block opens the file without locking it; leaving it releases the lock. A child that
    inherits the descriptor holds the lock, too. A link in the file's place is refused with
    ``OSError``: what it points to would be written over. So is a pipe or a device.
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
        """Take the lock if that needs no waiting; return whether it is held now."""
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


NO_FILES = {errno.ELOOP: "a link", errno.EISDIR: "a folder", errno.ENXIO: "a pipe or socket"}


def _open_no_link(path: str, flags: int, mode: int = 0o666) -> int:
    # Without O_NONBLOCK a pipe that nobody reads would be waited for.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    what = "a pipe or device"
    try:
        descriptor = os.open(path, flags, mode)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        number = errno.EINVAL
    except OSError as error:
        if error.errno not in NO_FILES:
            raise
        number, what = error.errno, NO_FILES[error.errno]
    raise OSError(number, f"{what} is in the place of this file; remove it", path)


def open_private(path: Path) -> int:
    """Open a file for writing that only this user reads, made where it is missing.

    Returns:
        Its descriptor.

    Raises:
        OSError: A link, pipe or device is in its place, or it cannot be opened.
    """
    return _open_no_link(str(path), os.O_WRONLY | os.O_CREAT, 0o600)


LITTLE_ROOM = 2**26  # bytes


def full_disks(*folders: Path) -> str:
    """Return what a message adds about disks of ``folders`` that are almost full, or ""."""
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


@contextmanager
def naming_full_disks(*folders: Path) -> Iterator[None]:
    """Turn the error of a full disk into one that says which disk it is, and what to do.

    Args:
        folders: Where the block writes, besides the folder for temporary files.
    """
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        full = full_disks(*folders, temporary_root())
        raise RlhfError(
            f"{first_line(error)}{full}; make room and run the command again"
        ) from error


def fsync_path(path: Path) -> None:
    """Bring a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def md5_file(path: Path) -> str:
    """Return the hash by which DVC names a file: of its content, and no protection from forgery."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


class FileHashes:
    """Hashes of files' contents, remembered in a JSON file so that each file is read once.

    A file is known by its size, times and inode.
    """

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self.known: dict[str, list[Any]] = {}
        # If the memory is missing or damaged, each file is read once more.
        with suppress(DataError):
            self.known = read_json(memory)
        self.fresh: dict[str, list[Any]] = {}

    def of(self, file: Path) -> str:
        """Return the hex digest of a file's content; ``FileNotFoundError`` if there is none."""
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
    """Return the hex digest of a file, or of a folder's sorted file names and contents."""
    path = Path(path)
    if path.is_file():
        return sha256_file(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = os.fsencode(file.relative_to(path).as_posix())  # which need not be UTF-8
        digest.update(name + f"\0{sha256_file(file)}\n".encode())
    return digest.hexdigest()

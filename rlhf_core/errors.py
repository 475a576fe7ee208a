"""The one exception family a user sees, and the process exit codes that go with it."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path
from typing import Any

from rlhf_core.redaction import redacted

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_GATE_FAILED = 3
EXIT_TRAINING_PAUSED = 4
EXIT_NOT_PROMOTED = 5
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130
# What is quoted of a library's error.
QUOTED_CHARACTERS = 300
# No room on the device, in a quota, or under ulimit -f.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of this process, and of the machine.
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_NO_FILES_WORDS = "Too many open files"
MORE_FILES = "raise the limit of open files (`ulimit -n`)"
# What SQLAlchemy writes behind a database's own words.
_STATEMENT = re.compile(r" \[SQL: | \(Background on this error")
# The last two where there is none for the stack of another thread: Python's words and rayon's.
_NO_MEMORY = (
    "can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "can't start new thread", "ThreadPoolBuildError",
    # By CPython, where a part of it could not even make its MemoryError.
    "error return without exception set", "without setting an exception",
)  # fmt: skip
# The last by SQLite.
NO_ROOM_WORDS = (
    "No space left on device", "Disk quota exceeded", "File too large", "database or disk is full",
)  # fmt: skip


class RlhfError(Exception):
    """A failure with a message for the user: what went wrong, where, and what to do about it.

    The command line prints the message, several mistakes on a line each, and exits with
    ``exit_code``; ``--debug`` adds the traceback.

    Attributes:
        trained: What a training that this ended had made by then: model, history and, of PPO,
            findings.
    """

    exit_code = EXIT_USER_ERROR
    trained: Any = None

    def __init__(self, message: str = "", exit_code: int | None = None) -> None:
        """``exit_code`` replaces that of the class."""
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        """The message without secrets: it may quote a library."""
        return redacted(super().__str__())


class ConfigError(RlhfError):
    """A parameter is unknown, of the wrong type or out of range."""


class DataError(RlhfError):
    """A data file is missing, empty, unreadable or of an unknown format."""


class UnwritableText(DataError):
    """A tokenizer cannot write a dialogue or a text; ``reason`` says why, without a quotation of
    the text.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ModelError(RlhfError):
    """A model folder is missing, incomplete or unreadable."""


class CheckpointError(RlhfError):
    """Every saved checkpoint of a run is unusable, one cannot be written, or the store for them
    cannot be used.
    """


class GateFailed(RlhfError):
    """A gate's conditions do not hold; ``evidence`` is the ``gates/NAME.json`` that says which, if
    there is one.
    """

    exit_code = EXIT_GATE_FAILED

    def __init__(self, message: str = "", evidence: Path | None = None) -> None:
        super().__init__(message)
        self.evidence = evidence


class TrainingPaused(RlhfError):
    """A health rule or repeated non-finite steps stopped training; the message says what is
    kept.
    """

    exit_code = EXIT_TRAINING_PAUSED


class Preempted(RlhfError):
    """SIGTERM stopped the stage; run again, it goes on from its last checkpoint."""

    exit_code = EXIT_PREEMPTED


def first_line(error: BaseException) -> str:
    """The first line of an error's text as a message quotes it: without secrets, not long; its
    class if it is empty.
    """
    text = str(error)
    if (
        isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list)
    ):  # one for each file
        text = str(error.args[0][0][-1])
    line = next((line.strip() for line in text.splitlines() if line.strip()), "").rstrip(":. ")
    line = redacted(line)
    return (line if len(line) <= QUOTED_CHARACTERS else f"{line[:QUOTED_CHARACTERS]}…") or type(
        error
    ).__name__


def named_line(error: BaseException) -> str:
    """The whole text of an error in one line, behind its class unless it is one for users; not
    long, no secrets.

    Of a database's error that is what went wrong, without the statement and its values.
    """
    text = _STATEMENT.split(" ".join(str(error).split()))[0]
    named = (
        text
        if isinstance(error, RlhfError)
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )
    return redacted(named)[:QUOTED_CHARACTERS]


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust, such as tokenizers, gave up: that is no ``Exception``.

    pyo3 gives its class no module to import it from.
    """
    return type(error).__name__ == "PanicException"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether main memory, or what ``ulimit -v`` or a container leaves of it, is used up."""
    if not isinstance(error, Exception) or isinstance(error, RlhfError):
        return False
    refused = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    return refused or any(said in str(error) for said in _NO_MEMORY)


def is_out_of_device_memory(error: BaseException) -> bool:
    """Whether a GPU's memory is used up. torch says so by a class, its libraries by words."""
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError)
        and not isinstance(error, RlhfError)
        and "CUDA" in str(error)
        and "out of memory" in str(error)
    )


def is_exhausted(error: BaseException) -> bool:
    """Whether memory, a disk or the number of open files is used up.

    That is no fault of the file that was read.
    """
    return is_out_of_memory(error) or is_full_disk(error) or is_out_of_files(error)


def is_out_of_files(error: BaseException) -> bool:
    """Whether as many files are open as may be. Libraries say so in the message alone."""
    if not isinstance(error, Exception) or isinstance(error, RlhfError):
        return False
    return (isinstance(error, OSError) and error.errno in _NO_FILES) or _NO_FILES_WORDS in str(
        error
    )


def is_full_disk(error: BaseException) -> bool:
    """Whether a disk, its inodes or a quota are used up. Libraries in other languages say so in the
    message alone.
    """
    if not isinstance(error, Exception) or isinstance(error, RlhfError):
        return False
    return (isinstance(error, OSError) and error.errno in _NO_ROOM) or any(
        said in str(error) for said in NO_ROOM_WORDS
    )


def cannot_write(folder: Path, error: OSError) -> RlhfError:
    """Return the one-line error for a folder that cannot be written to."""
    remedy = "make room on its disk" if is_full_disk(error) else "make it writable"
    return RlhfError(
        f"cannot write to {folder} ({error.strerror}); {remedy} or choose another workspace"
    )

"""How the command line ends where a command fails: one line, and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from rlhf_core.errors import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    MORE_FILES,
    GateFailed,
    RlhfError,
    first_line,
    is_full_disk,
    is_out_of_files,
    is_out_of_memory,
)

DEBUG = "--debug"
UNEXPECTED_LENGTH = 500


def check_streams() -> None:
    """Fill the places of closed standard streams, which the next opened file would take.

    Raises:
        OSError: Standard output is closed.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - for good
    if "stdout" in closed:
        raise OSError(errno.EBADF, "standard output is closed")


def report_error(error: BaseException) -> int:
    """Print ``error`` on standard error and return the exit status that goes with it."""
    from flows.commands.text import print_error, print_gate_failure
    from rlhf_core.storage.files import full_disks, temporary_root

    match error:
        case GateFailed():
            print_gate_failure(error, sys.stderr)
            return error.exit_code
        case RlhfError():
            print_error(str(error), sys.stderr)
            return error.exit_code
        case KeyboardInterrupt():
            print_error("stopped", sys.stderr)
            return EXIT_INTERRUPTED
        case OSError(errno=errno.EBADF) if "standard output" in str(error):
            print_error("standard output is closed; let the command write somewhere", sys.stderr)
            return EXIT_USER_ERROR
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS, filename=str(path)):
            print_error(
                f"{path}: {error.strerror}; give yourself the right to it, or choose another",
                sys.stderr,
            )
            return EXIT_USER_ERROR
        case _ if is_out_of_memory(error):
            remedy = "end what else uses it, or raise the limit (`ulimit -v`, the container's)"
            print_error(f"main memory is used up; {remedy}", sys.stderr)
            return EXIT_USER_ERROR
        case _ if is_out_of_files(error):
            print_error(f"{first_line(error)}; {MORE_FILES} and run the command again", sys.stderr)
            return EXIT_USER_ERROR
        case _ if is_full_disk(error):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left in its buffer would fail again
            full = full_disks(Path.cwd(), temporary_root())
            print_error(
                f"{first_line(error)}{full}; make room and run the command again", sys.stderr
            )
            return EXIT_USER_ERROR
        case _:
            message = str(error).strip()[:UNEXPECTED_LENGTH]
            print_error(
                f"{type(error).__name__}: {message} (add {DEBUG} for the traceback)", sys.stderr
            )
            return 1

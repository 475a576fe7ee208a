"""A condition of every fault in docs/faults.md: no process is left behind, whatever is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator

import psutil
import pytest

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process behind: every orphan, in any session, becomes a child of
    this process.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = {child.pid for child in psutil.Process().children()}
    yield
    deadline = time.monotonic() + PATIENCE
    while (left := new_children(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    described = [(child.pid, child.cmdline()) for child in left]
    for child in left:
        child.kill()
    prctl(PR_SET_CHILD_SUBREAPER, 0)
    assert not described, f"left behind: {described}"


def new_children(before: set[int]) -> list[psutil.Process]:
    """Return the live children that are not in ``before``, and wait for dead ones."""
    living = []
    for child in psutil.Process().children():
        if child.pid in before:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
            else:
                living.append(child)
    return living

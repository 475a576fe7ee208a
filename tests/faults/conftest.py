"""What every row of docs/faults.md has in common: whoever is killed, no process is left behind."""

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
    """Every orphan of the test becomes a child of this process, session of its own or not; none may be there after."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = {child.pid for child in psutil.Process().children()}
    yield
    deadline = time.monotonic() + PATIENCE
    while (left := strangers(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    described = [(child.pid, child.cmdline()) for child in left]
    for child in left:
        child.kill()
    prctl(PR_SET_CHILD_SUBREAPER, 0)
    assert not described, f"left behind: {described}"


def strangers(before: set[int]) -> list[psutil.Process]:
    """Children that live and were not there ``before``; the dead among them are reaped."""
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

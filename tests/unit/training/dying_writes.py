"""An SFT run that is killed with SIGKILL at each of ``MOMENTS`` of a checkpoint, and then finished.

Run as a script. Every run is a process of its own, forked from one that has only imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from unit.ppo.rollback_runs import dying
from unit.training import tiny

from rlhf_core.training.checkpoints import manager
from rlhf_core.training.checkpoints.host_copies import HostCopies


def half_a_state() -> None:
    """Of the second state file only the first half reaches the disk."""
    original, calls = manager.write_pieces, []

    def write_pieces(path: Path, pieces: Any) -> None:
        original(path, pieces)
        calls.append(path)
        if len(calls) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    manager.write_pieces = write_pieces  # type: ignore[assignment]


def half_of_what_is_waited_for() -> None:
    """There is no room for copies."""
    HostCopies._room = lambda self: 0  # type: ignore[method-assign]
    half_a_state()


MOMENTS: dict[str, Callable[[], None]] = {
    "while-it-is-copied": dying(HostCopies, "copy", 2, after=False),
    "half-a-state": half_a_state,
    "half-of-what-is-waited-for": half_of_what_is_waited_for,
    # A checkpoint writes its meta and its manifest. It flushes six times: the state, the history, these two, its
    # folder, and the folder around it once it has its name there.
    "before-the-manifest": dying(manager, "_write_text", 4, after=False),
    "before-it-has-its-name": dying(manager, "fsync_path", 11, after=False),
    "when-it-has-its-name": dying(manager, "fsync_path", 12, after=False),
    # Two are kept: the third checkpoint is the first after which one goes.
    "before-the-old-one-goes": dying(manager.shutil, "rmtree", 1, after=False),
}


def forked(root: Path, out: str, patch: Callable[[], None] | None) -> int:
    """The signal or exit code that a process ended with which ran there."""
    child = os.fork()
    if child == 0:
        if patch is not None:
            patch()
        tiny.run_stage("sft", root, out)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for moment, patch in MOMENTS.items():
        assert forked(Path(sys.argv[1]), moment, patch) == -signal.SIGKILL, f"{moment} did not kill"
        left = sorted(path.name for path in Path(sys.argv[1], moment, "work", "checkpoints").iterdir())
        print(moment, *left, flush=True)
        assert forked(Path(sys.argv[1]), moment, None) == 0, f"{moment} did not finish"

"""An SFT run that is killed with SIGKILL at each of ``MOMENTS`` of its second checkpoint, and then finished.

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

from rlhf_core.training.checkpoints import checkpoint


def half_a_state() -> None:
    """Of the second state file only the first half reaches the disk."""
    original, calls = checkpoint.save_file, []

    def save_file(tensors: Any, path: Path) -> None:
        original(tensors, path)
        calls.append(path)
        if len(calls) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = save_file  # type: ignore[assignment]


MOMENTS: dict[str, Callable[[], None]] = {
    "half-a-state": half_a_state,
    # A checkpoint writes its meta and its manifest, and flushes four times: the folder last, under its final name.
    "before-the-manifest": dying(checkpoint, "_write", 4, after=False),
    "before-the-old-one-goes": dying(checkpoint, "_flush", 8, after=False),
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

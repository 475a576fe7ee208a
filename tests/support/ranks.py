"""Functions run on several ranks (processes joined by gloo), for tests of what happens between
them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported once by the server that every rank is forked from.
PRELOAD = [
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "rlhf_core.ppo.trainer",
    "unit.ppo.tiny",
]
SECONDS = 500


def run_ranks(function: Callable[..., None], size: int, folder: Path, *args: Any) -> None:
    """Run ``function(folder, *args)`` on ``size`` ranks and wait; failures are raised here with
    their tracebacks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(function, rank, size, port, folder, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    errors = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    assert not errors, "\n".join(errors)
    assert [process.exitcode for process in processes] == [0] * size


def exit_code_of(function: Callable[..., object], *args: Any) -> int:
    """Run a function of a module in a process forked from one that has only imported, and return
    how it ended.

    A negative number is the signal that ended it. No other interpreter imports torch for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=function, args=args)
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{function.__name__} did not end within {SECONDS} s")
    assert process.exitcode is not None
    return process.exitcode


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _rank(
    function: Callable[..., None],
    rank: int,
    size: int,
    port: int,
    folder: Path,
    args: tuple[Any, ...],
) -> None:
    import torch

    from rlhf_core.runtime import distributed

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    try:
        with distributed.process_group():
            function(folder, *args)
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(
            f"rank {rank} of {size}\n{traceback.format_exc()}"
        )
        os._exit(1)

"""What benchmarks share: times, runs in turn, processes that are asked for one run after another, a
yardstick.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from rlhf_core.models.kernels import linear
from rlhf_core.runtime import distributed
from rlhf_extras.memory.roofline import Device

LAST_WORDS = 2000  # characters of a failed process's log

# Makes one run; returns the numbers that were measured.
Run = Callable[[], Sequence[float]]


def announce(what: str) -> None:
    """Say on a terminal what is measured next; the thread of a spinner would take time from it."""
    if sys.stderr.isatty():
        print(f"measuring {what}…", file=sys.stderr, flush=True)


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median wall time of ``work`` after one run to warm up, on a GPU until its last kernel has
    ended.
    """

    def taken() -> float:
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    taken()
    return statistics.median(taken() for _ in range(repeats))


def matmul_flops(
    size: int = 1024,
    repeats: int = 20,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> float:
    """Floating-point operations per second of a product of large square matrices, by the library
    that models use.
    """
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: linear(left, right), repeats)


def measured_device(dtype: torch.dtype) -> Device:
    """The limits of this process's device: a product of large square matrices, and a copy larger
    than its caches.
    """
    device = distributed.device()
    on_gpu = device.type == "cuda"
    size, length = (8192, 1 << 28) if on_gpu else (2048, 1 << 26)
    source, target = (torch.zeros(length, dtype=torch.float32, device=device) for _ in range(2))
    flops = matmul_flops(size, 10, dtype, device)
    copy = seconds(lambda: target.copy_(source), 10)
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return Device(name, flops, 2 * source.nbytes / copy)


def in_turn(runs: Sequence[Run], repeats: int) -> list[list[float]]:
    """The medians of what each run measures, all made in turn, so that other work on the machine
    meets all of them.
    """
    rounds = [[run() for run in runs] for _ in range(repeats)]
    return [
        [statistics.median(column) for column in zip(*of_run, strict=True)]
        for of_run in zip(*rounds, strict=True)
    ]


@contextmanager
def worker(
    command: Sequence[str],
    answer: str,
    environment: Mapping[str, str] | None = None,
    first: str | None = None,
    log: IO[str] | None = None,
) -> Iterator[Run]:
    """Run a process that makes a run for each line of its input; yields what asks for one, once it
    is ready.

    Args:
        command: The process; it ends when its input does.
        answer: What its answers begin with: one when it is ready, and one with the numbers of each
            run.
        environment: Its variables; None for those of this process.
        first: A line that it reads before it is ready, if any.
        log: Where its warnings go; None for those of this process. Its end is shown when the
            process fails.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def read() -> list[str]:
            for line in process.stdout or ():
                if line.startswith(answer):
                    return line.removeprefix(answer).split()
            said = (
                ""
                if log is None
                else ":\n" + Path(log.name).read_text(errors="replace")[-LAST_WORDS:]
            )
            raise SystemExit(f"a process of {command[0]} ended with status {process.wait()}{said}")

        def ask() -> list[float]:
            print(file=process.stdin, flush=True)
            return [float(number) for number in read()]

        if first is not None:
            print(first, file=process.stdin, flush=True)
        read()
        yield ask


def distance(changes: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The relative L2 distance of the changes of weights from the reference's; infinite where they
    are not of the same weights.
    """
    if changes.keys() != reference.keys():
        return math.inf
    apart = size = 0.0
    for name, expected in reference.items():
        apart += float((changes[name].double() - expected.double()).square().sum())
        size += float(expected.double().square().sum())
    return math.sqrt(apart / size) if size else math.inf

"""What the machine can do: the yardstick of every ratio here."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SIZE = 1024


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median wall time of ``work`` after one run to warm up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def matmul_flops() -> float:
    """Floating-point operations per second of a large float32 matrix product."""
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    return 2 * SIZE**3 / seconds(lambda: left @ right, 20)


def training_flops_per_token(parameters: int) -> float:
    """Forward and backward of a dense transformer: six operations per parameter and token (Kaplan et al., 2020)."""
    return 6.0 * parameters

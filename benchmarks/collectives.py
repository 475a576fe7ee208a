"""``torchrun -m benchmarks.collectives``: how fast ranks sum and gather tensors.

A module of its own, since the models that the other checks import take longer than the sums.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_core.runtime import distributed
from rlhf_core.storage.files import atomic_write_json

ROUNDS = 5


def main() -> int:
    """Measure, write what was found, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("output", type=Path, help="where the findings go, as JSON")
    parser.add_argument("--mib", type=int, nargs="+", help="sizes of the tensors that travel")
    given = parser.parse_args()
    with distributed.process_group():
        found = bandwidths(given.mib)
        if distributed.is_rank_zero():
            atomic_write_json(given.output, found)
    return 0


def bandwidths(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes per second of a sum and of a gathering of float32 tensors of so many MiB.

    ``algorithm`` is the tensor's bytes by the seconds. ``bus`` is what each link carries whatever
    the number n of ranks is, as NVIDIA's nccl-tests count it: 2 (n - 1) / n times that of a sum, and
    (n - 1) / n times that of a gathering, whose bytes are those of the whole.
    """
    ranks, device = distributed.world_size(), distributed.device()
    found: dict[str, Any] = {"backend": "nccl" if device.type == "cuda" else "gloo"}
    for mib in sizes:
        share = max((mib << 20) // 4 // ranks, 1)
        whole, own = torch.zeros(share * ranks, device=device), torch.zeros(share, device=device)
        seconds = {
            "all_reduce": _slowest(partial(dist.all_reduce, whole)),
            "all_gather": _slowest(partial(dist.all_gather_into_tensor, whole, own)),
        }
        factors = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks}
        for name, taken in seconds.items():
            speed = whole.nbytes / taken
            found.setdefault(name, {})[f"{mib} MiB"] = {
                "seconds": taken,
                "algorithm": speed,
                "bus": speed * factors[name],
            }
    return found


def _slowest(operation: Callable[[], object]) -> float:
    """Seconds of one operation on the slowest rank, of :data:`ROUNDS` after two to warm up."""
    for _ in range(2):
        operation()
    _wait()
    started = time.perf_counter()
    for _ in range(ROUNDS):
        operation()
    _wait()
    taken = (time.perf_counter() - started) / ROUNDS
    return distributed.reduce_metrics({"seconds_max": taken})["seconds_max"]


def _wait() -> None:
    """Wait for the device, and for the other ranks."""
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()
    distributed.any_rank(False)


if __name__ == "__main__":
    sys.exit(main())

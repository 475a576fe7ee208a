"""Counters of what makes a training step wait: tensors read by the host, and reductions over
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# What waits until the device has computed a tensor, on a GPU.
READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


@dataclass
class Calls:
    """Names of the methods that were called, and sizes of the tensors that they were called
    with.
    """

    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


@contextmanager
def counted_reads() -> Iterator[Calls]:
    """Count tensors that are read by the host in the block, from any thread."""
    calls = Calls()
    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(
                mock.patch.object(torch.Tensor, name, _counting(calls, name, torch.Tensor))
            )
        yield calls


@contextmanager
def counted_reductions() -> Iterator[Calls]:
    """Count sums, maxima and the like over ranks in the block."""
    calls = Calls()
    with ExitStack() as stack:
        for name in REDUCTIONS:
            stack.enter_context(mock.patch.object(dist, name, _counting(calls, name, dist)))
        yield calls


def _counting(calls: Calls, name: str, owner: Any) -> Any:
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        tensor = next(
            value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
        )
        calls.names.append(name)
        calls.sizes.append(tensor.numel())
        return original(*args, **kwargs)

    return counted

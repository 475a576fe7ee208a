"""Metrics that stay on the device until all of them are read at once: the host waits for it once, not at every pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rlhf_core.runtime import distributed

if TYPE_CHECKING:
    from rlhf_core.training.engine.base import Engine

Scalar = float | Tensor
Share = tuple[Mapping[str, Scalar], float]  # metrics of one pass, and the weight of its terms


def device_scalar(value: Tensor) -> Tensor:
    """A tensor of one number, () -> (), without gradient and in float64, which rounds as Python's numbers do."""
    return value.detach().double()


def read_scalars(groups: Sequence[Mapping[str, Scalar]]) -> list[dict[str, float]]:
    """Return the same mappings with numbers, after one transfer of all tensors, which must be of one device."""
    tensors = [value.double() for group in groups for value in group.values() if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [
        {name: float(next(numbers) if isinstance(value, Tensor) else value) for name, value in group.items()}
        for group in groups
    ]


def totals_of_steps(steps: Sequence[Sequence[Share]]) -> list[dict[str, float]]:
    """Add up the shares of each step's passes, each times its weight, over all ranks; ``_max`` takes the largest.

    All tensors are read in one transfer.
    """
    numbers = iter(read_scalars([metrics for shares in steps for metrics, _ in shares]))
    totals = []
    for shares in steps:
        sums: dict[str, float] = {}
        for _, weight in shares:
            for name, value in next(numbers).items():
                if name.endswith("_max"):
                    sums[name] = larger(sums.get(name, value), value)
                else:
                    sums[name] = sums.get(name, 0.0) + weight * value
        totals.append(distributed.reduce_metrics(sums))
    return totals


Part = TypeVar("Part")


def gradient_shares(
    engine: Engine,
    parts: Iterable[tuple[Part, float]],
    compute: Callable[[Part], tuple[Tensor, Mapping[str, Scalar]]],
) -> list[Share]:
    """Put the gradients of one step's passes into ``engine``; returns what ``compute`` says of each.

    Args:
        engine: Trains the model that ``compute`` runs.
        parts: Of each pass what it is made of, with the weight of its terms.
        compute: The loss and the metrics of a part, each divided by the totals of the whole step.
    """
    shares: list[Share] = []
    for part, weight in parts:
        loss, metrics = engine.forward(partial(compute, part))
        engine.backward(weight * loss)
        shares.append((metrics, weight))
    return shares


def accumulate_gradients(
    engine: Engine,
    parts: Iterable[tuple[Part, float]],
    compute: Callable[[Part], tuple[Tensor, Mapping[str, Scalar]]],
) -> dict[str, float]:
    """:func:`gradient_shares` added up over passes and ranks."""
    return totals_of_steps([gradient_shares(engine, parts, compute)])[0]


def mean_of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average every metric over the steps that have it; ``_max`` values take the largest."""
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {
        name: reduce(larger, series) if name.endswith("_max") else sum(series) / len(series)
        for name, series in values.items()
    }


def larger(first: float, second: float) -> float:
    """The larger of two numbers, NaN if one of them is: ``max`` would drop it or not by their order."""
    return second if second > first or math.isnan(second) else first

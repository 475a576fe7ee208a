"""The passes of a step: their gradients, their metrics, and those of several small models at once.

Metrics stay on the device until all of them are read at once: the host waits for it once, not at
every pass.

Small models pass side by side, each in a thread of its own, on the cores that their products leave
idle. The matrix products of a model of a few million parameters gain nothing from a second thread,
but policy, reference, critic, reward model and referee do not wait for each other. No model's
arithmetic changes, so that results have the same bits as one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf_core.runtime import distributed
from rlhf_core.runtime.machine import available_cores

if TYPE_CHECKING:
    from rlhf_core.training.engine.base import Engine

Scalar = float | Tensor
Share = tuple[Mapping[str, Scalar], float]  # metrics of one pass, and the weight of its terms


def device_scalar(value: Tensor) -> Tensor:
    """The number of a tensor () -> () in float64, without gradient.

    It rounds as Python's numbers do.
    """
    return value.detach().double()


def read_scalars(groups: Sequence[Mapping[str, Scalar]]) -> list[dict[str, float]]:
    """Return the same mappings with numbers, after one transfer of all tensors.

    These must be of one device.
    """
    tensors: list[Tensor] = []
    for group in groups:
        tensors += [value.double() for value in group.values() if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    read = []
    for group in groups:
        own: dict[str, float] = {}
        for name, value in group.items():
            own[name] = float(next(numbers) if isinstance(value, Tensor) else value)
        read.append(own)
    return read


def totals_of_steps(steps: Sequence[Sequence[Share]]) -> list[dict[str, float]]:
    """Add up the shares of each step's passes, each times its weight, over all ranks.

    ``_max`` takes the largest.

    All tensors are read in one transfer.
    """
    groups: list[Mapping[str, Scalar]] = []
    for shares in steps:
        groups += [metrics for metrics, _ in shares]
    numbers = iter(read_scalars(groups))
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
    """Put the gradients of one step's passes into ``engine``.

    Returns what ``compute`` says of each.

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
    means: dict[str, float] = {}
    for name, series in values.items():
        if name.endswith("_max"):
            means[name] = reduce(larger, series)
        else:
            means[name] = sum(series) / len(series)
    return means


def larger(first: float, second: float) -> float:
    """The larger of two numbers, NaN if one of them is.

    ``max`` would drop it or not by their order.
    """
    return second if second > first or math.isnan(second) else first


# Larger models use several cores in one product, and two at once would hold the activations of
# both.
MAX_PARAMETERS = 10_000_000


def run_side_by_side(*tasks: Callable[[], Any], models: Iterable[object]) -> list[Any]:
    """Run ``tasks``, at once where that is safe and of use, and return their results in order.

    Each task sets its own gradient mode: a new thread computes gradients.

    Args:
        tasks: What to run. A task changes nothing that another task reads.
        models: All models that the tasks call; two tasks may read the same model but for modules
            that keep state.

    Raises:
        Exception: The first error of a task, in their order, after all have ended.
    """
    workers = min(idle_workers(), len(tasks))
    if workers < 2 or not all(_small_and_stateless(model) for model in models):
        results = []
        for task in tasks:
            results.append(task())
        return results
    with ThreadPoolExecutor(workers, thread_name_prefix="model") as pool:
        futures = [pool.submit(task) for task in tasks]
    return [future.result() for future in futures]


def idle_workers() -> int:
    """Threads of models that the cores of this process have room for.

    1 on GPUs, and where ranks take turns.
    """
    if distributed.active() or distributed.device().type != "cpu":
        return 1
    return available_cores() // torch.get_num_threads()


def _small_and_stateless(model: object) -> bool:
    """Whether a pass reads nothing but weights, of which there are few.

    Adapters on a shared base are switched on and off around a pass, and dropout draws from one
    generator.
    """
    if (
        not isinstance(model, nn.Module)
        or sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS
    ):
        return False
    return not any(
        hasattr(module, "active_adapter")
        or (isinstance(module, nn.Dropout) and module.training and module.p > 0)
        for module in model.modules()
    )

"""Passes of several small models at once, each in a thread of its own, on the cores that their products leave idle.

The matrix products of a model of a few million parameters gain nothing from a second thread, but policy, reference,
critic, reward model and referee do not wait for each other. No model's arithmetic changes, so that results have the
same bits as one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from rlhf_core.runtime import distributed
from rlhf_core.runtime.machine import available_cores

# Larger models use several cores in one product, and two at once would hold the activations of both.
MAX_PARAMETERS = 10_000_000


def run_side_by_side(*tasks: Callable[[], Any], models: Iterable[object]) -> list[Any]:
    """Run ``tasks``, at once where that is safe and of use, and return their results in order.

    Each task sets its own gradient mode: a new thread computes gradients.

    Args:
        tasks: What to run. A task changes nothing that another one reads.
        models: All models that the tasks call; two tasks may read the same model but for modules that keep state.

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
    """Threads of models that the cores of this process have room for; 1 on GPUs, and where ranks take turns."""
    if distributed.active() or distributed.device().type != "cpu":
        return 1
    return available_cores() // torch.get_num_threads()


def _small_and_stateless(model: object) -> bool:
    """Whether a pass reads nothing but weights, of which there are few.

    Adapters on a shared base are switched on and off around a pass, and dropout draws from one generator.
    """
    if not isinstance(model, nn.Module) or sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        return False
    return not any(
        hasattr(module, "active_adapter") or (isinstance(module, nn.Dropout) and module.training and module.p > 0)
        for module in model.modules()
    )

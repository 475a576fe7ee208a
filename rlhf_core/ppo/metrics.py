"""Typed metric records of the phases of PPO, and how records of micro-batches, ranks and steps become one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar

import torch

from rlhf_core.runtime import distributed
from rlhf_core.training.device_scalars import Scalar, read_scalars

Record = TypeVar("Record", bound="MetricRecord")


@dataclass(frozen=True)
class MetricRecord:
    """Base of metric records: the names of the fields are those of docs/metrics.md. None means not measured.

    The shares of micro-batches may be tensors, which :func:`total` reads all at once.
    """

    def as_metrics(self) -> dict[str, float]:
        """Return all measured values by name, those of nested records among them."""
        return read_scalars([self.as_scalars()])[0]

    def as_scalars(self) -> dict[str, Scalar]:
        """Return the values as they are, without waiting for tensors among them."""
        metrics: dict[str, Scalar] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, MetricRecord):
                metrics |= value.as_scalars()
            elif value is not None:
                metrics[field.name] = value
        return metrics


def total(parts: Sequence[tuple[Record, float]]) -> Record:
    """Add up the shares of micro-batches, each times its weight, over all ranks; ``_max`` values take the largest."""
    metrics: dict[str, float] = {}
    shares = read_scalars([record.as_scalars() for record, _ in parts])
    for share, (_, weight) in zip(shares, parts, strict=True):
        for name, value in share.items():
            if name.endswith("_max"):
                metrics[name] = largest(metrics.get(name, value), value)
            else:
                metrics[name] = metrics.get(name, 0.0) + weight * value
    return type(parts[0][0])(**distributed.reduce_metrics(metrics))


def mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average every metric over the steps that have it; ``_max`` values take the largest."""
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    metrics: dict[str, float] = {}
    for name, series in values.items():
        metrics[name] = sum(series) / len(series)
        if name.endswith("_max"):
            metrics[name] = series[0]
            for value in series[1:]:
                metrics[name] = largest(metrics[name], value)
    return metrics


def largest(first: float, second: float) -> float:
    """The larger of two numbers, NaN if one of them is: ``max`` would drop it or not by their order."""
    return second if second > first or math.isnan(second) else first


class PhaseClock:
    """Measures the wall-clock time of an iteration's phases, as metrics ``seconds_NAME``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, on a GPU until its last kernel has ended."""
        started = time.perf_counter()
        yield
        if distributed.device().type == "cuda":
            torch.cuda.synchronize()
        self.seconds[f"seconds_{name}"] = time.perf_counter() - started

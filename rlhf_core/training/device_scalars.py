"""Metrics that stay on the device until all of them are read at once: the host waits for it once, not at every pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Scalar = float | Tensor


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

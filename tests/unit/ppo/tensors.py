"""Tensors of hand-computed numbers, and their comparison."""

from __future__ import annotations

import math

import torch

NAN = math.nan


def t(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(a: torch.Tensor, b: object, tolerance: float = 1e-9) -> bool:
    return torch.allclose(
        a.double(), torch.as_tensor(b, dtype=torch.float64), atol=tolerance, rtol=0, equal_nan=True
    )

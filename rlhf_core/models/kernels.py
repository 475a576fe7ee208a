"""Faster kernels for a model's own layers; :func:`use_kernels` is their one switch.

On AMD processors with full AVX-512 NumPy's OpenBLAS computes float32 products: PyTorch gives them
to MKL, which computes there as if vectors had half their width. OpenBLAS is about twice as fast,
forward and backward (docs/performance.md), and adds up the terms of a sum in another order.

On a GPU a root-mean-square norm is one kernel. transformers computes it in float32 by eight, each
of which reads and writes the hidden states, and keeps three copies of them for the backward pass.
On an H100 a PPO iteration of a model of half a billion parameters took 6.9 s with it, and 8.3 s
without. On a CPU every norm computes as before, to the bit.

Shapes: M rows of the input, flattened; K inputs; N outputs; H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlhf_core.runtime.machine import (
    AVX512_KERNELS,
    is_amd_with_full_avx512,
    numpy_kernels,
    set_openblas_threads,
)

# With fewer rows MKL is as fast.
FEWEST_ROWS = 64


def use_kernels(model: nn.Module) -> list[tuple[Any, type[nn.Module]]]:
    """Give the layers of ``model`` the fastest kernels of this machine, in place.

    Weights and their names are kept. Moved to another device or precision, the layers compute as
    before. Linear layers of one output stay with PyTorch: theirs is a product of a matrix and a
    vector. OpenBLAS gets as many threads as PyTorch has now.

    Returns:
        The layers that this changed, each with the class that it had.
    """
    by_openblas = openblas_pays()
    if by_openblas:
        set_openblas_threads(torch.get_num_threads())
    changed = []
    for layer in model.modules():
        own = type(layer)
        faster: type[nn.Module] | None = None
        if own is nn.Linear and by_openblas:
            faster = OpenBlasLinear if _takes_openblas(layer) else None
        elif not isinstance(layer, FusedNorm) and _computes_rms_norm(layer):
            faster = _fused_class(own)
        if faster is not None:
            layer.__class__ = faster  # in place, so that hooks and other names of the layer stay
            changed.append((layer, own))
    return changed


@contextmanager
def kernels_inside(model: nn.Module) -> Iterator[None]:
    """Use the faster kernels inside the block; copies of the model that are made there keep them."""
    changed = use_kernels(model)
    try:
        yield
    finally:
        for layer, own in changed:
            layer.__class__ = own


# Products by OpenBLAS


def openblas_pays() -> bool:
    """Whether OpenBLAS, with the kernels that it has here, multiplies float32 faster than MKL."""
    return is_amd_with_full_avx512() and numpy_kernels() in AVX512_KERNELS


def is_plain_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer of PyTorch itself, whatever computes its products."""
    return type(module) in (nn.Linear, OpenBlasLinear)


class OpenBlasLinear(nn.Linear):
    """A linear layer that computes products of 64 and more float32 rows on a CPU by OpenBLAS.

    Those have first derivatives only, and none under the transforms of ``torch.func``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return _linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor) -> Tensor:
    """``x W^T`` of a weight that is in no layer, the fastest way: (..., K), (N, K) -> (..., N)."""
    return _linear(input, weight) if openblas_pays() else functional.linear(input, weight)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` as :class:`OpenBlasLinear` computes it."""
    by_openblas = input.numel() >= FEWEST_ROWS * weight.shape[1]
    by_openblas = by_openblas and _in_float32_on_cpu(input) and _in_float32_on_cpu(weight)
    if not by_openblas or torch.is_autocast_enabled("cpu"):
        return functional.linear(input, weight, bias)
    rows: Tensor = _Product.apply(input.reshape(-1, weight.shape[1]), weight)  # type: ignore[no-untyped-call]
    result = rows.view(*input.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias


class _Product(torch.autograd.Function):
    """``x W^T`` of inputs (M, K) and a weight (N, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        for_input, for_weight = ctx.needs_input_grad
        # As a linear layer does: under adapters the inputs of frozen weights are not kept.
        kept_input = x if for_weight else None
        kept_weight = weight if for_input else None
        ctx.save_for_backward(kept_input, kept_weight)
        return product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_input = product(gradient, weight) if weight is not None else None
        for_weight = product(gradient.t(), x) if x is not None else None
        return for_input, for_weight


def product(a: Tensor, b: Tensor) -> Tensor:
    """``A B`` of float32 matrices on the CPU, by OpenBLAS; no gradient."""
    # Another thread may be loading a model, and has changed the default type or device.
    result = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device="cpu")
    with np.errstate(all="ignore"):  # as PyTorch does of products that are not finite
        np.matmul(_for_blas(a), _for_blas(b), out=result.numpy())
    return result


def _for_blas(matrix: Tensor) -> np.ndarray[Any, Any]:
    """The matrix, copied where neither rows nor columns are contiguous.

    NumPy gives only contiguous ones to BLAS.
    """
    matrix = matrix.detach()
    if 1 not in matrix.stride() or 0 in matrix.stride():
        matrix = matrix.contiguous()
    return matrix.numpy()


def _takes_openblas(layer: Any) -> bool:
    return layer.out_features > 1 and _in_float32_on_cpu(layer.weight)


def _in_float32_on_cpu(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


# Norms in one kernel


class FusedNorm(nn.Module):
    """The base of all fused norms; each is also a subclass of the library's own class."""

    own: type[nn.Module]

    def forward(self, hidden: Tensor, *more: Any, **named: Any) -> Tensor:
        """(..., H) -> (..., H). With more inputs, such as a gate, as the library computes it."""
        weight: Any = self.weight
        if more or named or hidden.device.type == "cpu" or hidden.dtype != weight.dtype:
            plain: Tensor = self.own.forward(self, hidden, *more, **named)
            return plain
        return functional.rms_norm(hidden, weight.shape, weight, _epsilon(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle it under the library's class, since its own has no name in a module."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new, (self.own,), *reduced[2:])


_classes: dict[type[nn.Module], type[nn.Module]] = {}  # by the library's class


def _fused_class(own: type[nn.Module]) -> type[nn.Module]:
    if own not in _classes:
        made = type(f"Fused{own.__name__}", (FusedNorm, own), {"own": own})
        _classes.setdefault(own, made)
    return _classes[own]


def _new(own: type[nn.Module]) -> nn.Module:
    made = _fused_class(own)
    return made.__new__(made)


def _epsilon(norm: nn.Module) -> float | None:
    """What is added to the mean square, as the architectures call it."""
    epsilon: float | None = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return epsilon


def _computes_rms_norm(norm: nn.Module) -> bool:
    """Try a copy of ``norm`` on the CPU with a weight of which no two entries are alike.

    Some norms add one to the weight, take the mean from the input, or have no weight. Each is tried
    by itself, since one class may compute several.
    """
    if not type(norm).__name__.endswith("RMSNorm"):
        return False
    if "forward" in vars(norm):  # which hooks of accelerate exchange
        return False
    names = [name for name, _ in norm.named_parameters()]
    if names != ["weight"] or any(True for _ in norm.buffers()) or _epsilon(norm) is None:
        return False
    shape = norm.get_parameter("weight").shape
    # Under ZeRO 3 a sharded weight is empty, and on no numbers every norm would match.
    if len(shape) != 1 or not shape[0]:
        return False
    with torch.device("cpu"), torch.no_grad():
        tried, numbers = copy.copy(norm), torch.arange(shape[0], dtype=torch.float32)
        weight = nn.Parameter(0.5 + numbers.sin() ** 2)
        tried._parameters = {"weight": weight}
        # So small that what is added to the mean square shows.
        probe = 0.001 * (1.0 + numbers.cos()).unsqueeze(0)
        expected = functional.rms_norm(probe, shape, weight, _epsilon(norm))
        try:
            # A call would run the model's own hooks.
            found = tried.forward(probe)
        except Exception:  # whatever an architecture's norm needs besides
            return False
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, atol=1e-5)

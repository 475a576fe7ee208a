"""Linear layers in float32 whose products NumPy computes, by OpenBLAS, on AMD processors with full
AVX-512.

PyTorch gives float32 products to MKL, which computes them there as if vectors had half their width.
OpenBLAS computes the same products, forward and backward, about twice as fast
(docs/performance.md), with the terms of a sum in another order.

Shapes: M rows of the input, flattened; K inputs; N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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

# Per thread: the forward pass of a model takes no such argument.
_default_products = ContextVar("default_products", default=False)


class OpenBlasLinear(nn.Linear):
    """A linear layer that computes products of 64 and more float32 rows on a CPU by OpenBLAS.

    Those have first derivatives only, and none under the transforms of ``torch.func``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` as of :class:`OpenBlasLinear`: (..., K), (N, K), (N,) -> (..., N)."""
    by_openblas = input.numel() >= FEWEST_ROWS * weight.shape[1] and not _default_products.get()
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
        ctx.save_for_backward(x if for_weight else None, weight if for_input else None)
        return product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            product(gradient, weight) if weight is not None else None,
            product(gradient.t(), x) if x is not None else None,
        )


def product(a: Tensor, b: Tensor) -> Tensor:
    """``A B`` of float32 matrices on the CPU, by OpenBLAS; no gradient."""
    # Another thread may be loading a model, and has changed the default type or device.
    result = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device="cpu")
    with np.errstate(all="ignore"):  # as PyTorch does of products that are not finite
        np.matmul(_for_blas(a), _for_blas(b), out=result.numpy())
    return result


def _for_blas(matrix: Tensor) -> np.ndarray[Any, Any]:
    """The matrix, copied where neither its rows nor its columns are contiguous: NumPy gives only
    such ones to BLAS.
    """
    matrix = matrix.detach()
    return (
        matrix if 1 in matrix.stride() and 0 not in matrix.stride() else matrix.contiguous()
    ).numpy()


def is_plain_linear(module: nn.Module) -> bool:
    """Whether ``module`` is exactly a linear layer, no other subclass, whichever library computes
    its products.
    """
    return type(module) in (nn.Linear, OpenBlasLinear)


def openblas_pays() -> bool:
    """Whether OpenBLAS, with the kernels it has in this process, computes float32 products faster
    than MKL.
    """
    return is_amd_with_full_avx512() and numpy_kernels() in AVX512_KERNELS


def use_openblas(model: nn.Module) -> list[nn.Linear]:
    """Compute the products of a model's float32 linear layers on the CPU by OpenBLAS from now on,
    where that pays.

    The parameters are kept. Moved to another device or precision, the layers compute as before.
    Layers of one output stay with PyTorch: theirs is a product of a matrix and a vector. OpenBLAS
    gets as many threads as PyTorch has now.

    Returns:
        The layers that computed otherwise before.
    """
    if not openblas_pays():
        return []
    set_openblas_threads(torch.get_num_threads())
    plain = [
        layer for layer in model.modules() if type(layer) is nn.Linear and layer.out_features > 1
    ]
    changed = [layer for layer in plain if _in_float32_on_cpu(layer.weight)]
    for layer in changed:
        layer.__class__ = (
            OpenBlasLinear  # in place, so that hooks and other names of the layer stay
        )
    return changed


@contextmanager
def openblas_products(model: nn.Module) -> Iterator[None]:
    """Compute the products of ``model`` as :func:`use_openblas` does inside the block; copies made
    there keep it.
    """
    changed = use_openblas(model)
    try:
        yield
    finally:
        for layer in changed:
            layer.__class__ = nn.Linear


def fastest_linear() -> Callable[..., Tensor]:
    """Return :func:`linear` where that pays, else PyTorch's own, for products of weights that are
    in no layer.
    """
    return linear if openblas_pays() else functional.linear


@contextmanager
def default_products() -> Iterator[None]:
    """Compute by PyTorch's products inside the block, to compare a model in memory with its saved
    copy.

    One of them may never have been given to :func:`use_openblas`. Only the calling thread computes
    so.
    """
    token = _default_products.set(True)
    try:
        yield
    finally:
        _default_products.reset(token)


def _in_float32_on_cpu(tensor: Tensor) -> bool:
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and type(tensor) in (Tensor, nn.Parameter)
    )

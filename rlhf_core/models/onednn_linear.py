"""Linear layers in float32 on x86 processors with AVX-512, whose products oneDNN computes in place of MKL.

PyTorch gives float32 products to MKL. On an AMD EPYC core oneDNN computes the same products, forward and backward, more
than twice as fast (docs/performance.md). They are sums of the same terms in another order. The product of one row stays
as it is, since that is faster there.

Shapes: M rows of the input, flattened; K inputs; N outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

X86 = ("x86_64", "amd64")
# Half a millisecond for each new number of rows, in which oneDNN compiles a product, takes most of what products of
# smaller models gain. They keep their bits.
FEWEST_PARAMETERS = 1_000_000

# Of the current thread.
_default_products = ContextVar("default_products", default=False)


class OneDnnLinear(nn.Linear):
    """A linear layer that computes products of two and more float32 rows on a CPU by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        weight = self.weight
        by_onednn = input.numel() >= 2 * self.in_features and not _default_products.get()
        if not by_onednn or not _in_float32_on_cpu(input) or not _in_float32_on_cpu(weight):
            return functional.linear(input, weight, self.bias)
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            result: Tensor = _Product.apply(input, weight)  # type: ignore[no-untyped-call]
            return result if self.bias is None else result + self.bias
        return product(input, weight, self.bias)


class _Product(torch.autograd.Function):
    """``x W^T`` of inputs (..., K) and a weight (N, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        for_input, for_weight = ctx.needs_input_grad
        # As a linear layer does: under adapters the inputs of frozen weights are not kept.
        ctx.save_for_backward(x if for_weight else None, weight if for_input else None)
        return product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            product(gradient, weight.t()) if weight is not None else None,
            _transposed_product(gradient.flatten(0, -2), x.flatten(0, -2)) if x is not None else None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` by oneDNN: (..., K), (N, K) or a view of that shape, (N,) -> (..., N)."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """``A^T B`` of (M, N) and (M, K), (N, K): oneDNN is faster with the smaller number as that of rows."""
    if a.shape[1] <= b.shape[1]:
        return product(a.t(), b.t())
    return product(b.t(), a.t()).t()


def is_plain_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer that is nothing more, whichever library computes its products."""
    return type(module) in (nn.Linear, OneDnnLinear)


def onednn_pays() -> bool:
    """Whether this processor computes float32 products by oneDNN at least as fast as by PyTorch's default."""
    if platform.machine().lower() not in X86 or not torch.backends.mkldnn.is_available():
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn(model: nn.Module) -> None:
    """Compute the products of a model's float32 linear layers on the CPU by oneDNN from now on, where that pays.

    Parameters stay the very same. Moved to another device or precision, the layers compute as before. Heads of one
    output are left alone, whose products are none of matrices.
    """
    if not onednn_pays() or sum(parameter.numel() for parameter in model.parameters()) < FEWEST_PARAMETERS:
        return
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and _in_float32_on_cpu(layer.weight) and layer.out_features > 1:
            model.set_submodule(name, _with_onednn(layer))


@contextmanager
def default_products() -> Iterator[None]:
    """Compute by PyTorch's default inside the block, as a model in memory and its copy from the disk are compared.

    One of them may never have been given to :func:`use_onednn`. Only the calling thread computes so.
    """
    token = _default_products.set(True)
    try:
        yield
    finally:
        _default_products.reset(token)


def _in_float32_on_cpu(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _with_onednn(layer: nn.Linear) -> OneDnnLinear:
    made = OneDnnLinear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight, made.bias = layer.weight, layer.bias
    made.train(layer.training)
    return made

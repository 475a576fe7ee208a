"""Linear layers for decoding on a CPU, whose weights lie in the order in which oneDNN multiplies few rows fastest.

With the few rows of a decoding step they take about half the time of plain products, which read their weights in an
order made for many rows. Layers of the same input, as queries, keys and values have, are one product.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FusedProjection:
    """The weights of one or more linear layers of the same input, packed as one for products with about ``rows`` rows.

    Args:
        layers: The layers, for their biases.
        weights: Their weights (out, in), all of one precision, which inputs are converted to.
        rows: Rows of a decoding step.
    """

    def __init__(self, layers: Sequence[nn.Linear], weights: Sequence[Tensor], rows: int) -> None:
        self.precision = weights[0].dtype
        self.widths = [len(weight) for weight in weights]
        whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(whole.detach(), rows)
        biases = [layer.bias for layer in layers]
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            self.bias = torch.cat([
                weight.new_zeros(len(weight)) if bias is None else bias.detach().to(self.precision)
                for weight, bias in zip(weights, biases, strict=True)
            ])  # fmt: skip
        # Of the calling thread, so that two that sample with one model cannot take each other's.
        self._last = threading.local()

    def product(self, input: Tensor, position: int) -> Tensor:
        """(..., in) -> (..., out) of the layer at ``position``.

        The first one called computes for all of them, and those after it take that where they are called with the same
        tensor, which nothing must have changed meanwhile. In another order, or with other tensors, all is computed
        again: slower, but the same values.
        """
        held: tuple[Tensor, tuple[Tensor, ...]] | None = getattr(self._last, "held", None)
        if held is None or held[0] is not input:
            rows = torch.ops.mkldnn._linear_pointwise(input.to(self.precision), self.packed, self.bias, "none", [], "")
            held = input, rows.split(self.widths, dim=-1)
        self._last.held = held if position + 1 < len(self.widths) else None
        return held[1][position]


class PackedLinear(nn.Linear):
    """A linear layer without gradient that computes by a :class:`FusedProjection`, in its precision.

    The attribute ``weight`` is that of the layer it replaces, for models that look at its precision or device.
    """

    def __init__(self, replaced: nn.Linear, shared: FusedProjection, position: int) -> None:
        super().__init__(replaced.in_features, replaced.out_features, bias=False, device="meta")
        self.weight, self.shared, self.position = replaced.weight, shared, position

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.shared.product(input, self.position)

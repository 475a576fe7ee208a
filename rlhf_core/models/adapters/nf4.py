"""4-bit weights under adapters, QLoRA's NF4 (Dettmers et al. 2023): packing and unpacking frozen linear layers.

bitsandbytes packs and unpacks. Its own layer is not used: on a CPU it repacks its weights in place at the first pass
without gradient, and on a GPU it multiplies single tokens by other kernels than sequences, while PPO's sampler and
trainer have to agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rlhf_core.errors import RlhfError
from rlhf_core.models.io import quiet
from rlhf_core.models.openblas_linear import is_plain_linear

BLOCK = 64
MISSING = "quantize: nf4 is set, but bitsandbytes is not installed: pip install 'rlhf-pipeline[4bit]', or remove it"


@dataclass(frozen=True)
class PackedWeight:
    """A matrix in 4-bit codes, with one 8-bit scale for every 64 values (double quantisation)."""

    codes: Tensor
    scales: Any

    def unpacked(self) -> Tensor:
        """The dequantised matrix (out, in) in its original precision."""
        import bitsandbytes.functional as bnb

        matrix: Tensor = bnb.dequantize_4bit(self.codes, self.scales)
        return matrix

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Return itself, since it is immutable."""
        return self


class NF4Linear(nn.Linear):
    """A frozen linear layer without ``weight`` that unpacks its matrix in every forward and backward pass."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.register_parameter("weight", None)
        self.bias = layer.bias
        self.packed = packed(layer.weight)

    @property
    def qweight(self) -> Tensor:
        """The codes; peft reads the device of a layer without ``weight`` from this attribute."""
        return self.packed.codes

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        product: Tensor = _Product.apply(input, self.packed)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias

    def unpacked(self) -> nn.Linear:
        """Return the plain layer that computes the same."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.packed.unpacked(), requires_grad=False)
        layer.bias = self.bias
        return layer


class _Product(torch.autograd.Function):
    """``x W^T`` with W unpacked on demand and not stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight) -> Tensor:
        ctx.weight = weight
        return functional.linear(x, weight.unpacked())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.unpacked(), None


def packed(weight: Tensor) -> PackedWeight:
    """Quantise ``weight`` (out, in) to NF4, on its device. ``RlhfError`` if bitsandbytes is not installed."""
    try:
        with quiet():
            import bitsandbytes.functional as bnb
    except ImportError as error:
        raise RlhfError(MISSING) from error
    return PackedWeight(
        *bnb.quantize_4bit(weight.detach(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    )


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a plain or a packed linear layer, and not a subclass of them."""
    return is_plain_linear(module) or type(module) is NF4Linear


def pack_linear_layers(model: PreTrainedModel) -> None:
    """Pack every linear layer below the head of ``model``, in place."""
    backbone = model.base_model
    for name, layer in list(backbone.named_modules()):
        if is_plain_linear(layer):
            _replace(backbone, name, NF4Linear(layer))


def unpack_linear_layers(model: nn.Module) -> None:
    """Turn packed layers into plain ones that compute the same, in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, NF4Linear):
            _replace(model, name, layer.unpacked())


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)

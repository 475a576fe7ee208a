"""4-bit weights under adapters, QLoRA's NF4 (Dettmers et al. 2023): frozen linear layers packed, and whole again.

bitsandbytes packs and unpacks. Its own layer is not used: on a CPU that one repacks its weights in place at the first
pass without gradient, and on a GPU it multiplies single tokens by other kernels than sequences, where the sampler and
the trainer of PPO have to agree.
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

BLOCK = 64
MISSING = "quantize: nf4 is set, but bitsandbytes is not installed: pip install 'rlhf-pipeline[4bit]', or remove it"


@dataclass(frozen=True)
class PackedWeight:
    """A matrix as 4-bit codes; its scales, one for each 64 values, are in 8 bits themselves (double quantisation)."""

    codes: Tensor
    scales: Any

    def unpacked(self) -> Tensor:
        """The matrix (out, in) that the codes stand for, in the precision it had."""
        import bitsandbytes.functional as bnb

        matrix: Tensor = bnb.dequantize_4bit(self.codes, self.scales)
        return matrix

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Itself: nothing ever changes it."""
        return self


class NF4Linear(nn.Linear):
    """A frozen linear layer that unpacks its weight in every pass, forward and backward; it has no ``weight``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.register_parameter("weight", None)
        self.bias = layer.bias
        self.packed = packed(layer.weight)

    @property
    def qweight(self) -> Tensor:
        """The codes, under the name by which peft finds the device of a layer that has no ``weight``."""
        return self.packed.codes

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        product: Tensor = _Product.apply(input, self.packed)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias

    def unpacked(self) -> nn.Linear:
        """The plain layer that computes the same."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.packed.unpacked(), requires_grad=False)
        layer.bias = self.bias
        return layer


class _Product(torch.autograd.Function):
    """``x W^T`` with W unpacked when it is needed and never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight) -> Tensor:
        ctx.weight = weight
        return functional.linear(x, weight.unpacked())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.unpacked(), None


def packed(weight: Tensor) -> PackedWeight:
    """``weight`` (out, in) in NF4, on its device. ``RlhfError`` where bitsandbytes is missing."""
    try:
        with quiet():
            import bitsandbytes.functional as bnb
    except ImportError as error:
        raise RlhfError(MISSING) from error
    return PackedWeight(
        *bnb.quantize_4bit(weight.detach(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    )


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a plain linear layer or a packed one, and nothing built upon them."""
    return type(module) in (nn.Linear, NF4Linear)


def pack_linear_layers(model: PreTrainedModel) -> None:
    """Pack every linear layer below the head of ``model``, one after the other, in place."""
    backbone = model.base_model
    for name, layer in list(backbone.named_modules()):
        if type(layer) is nn.Linear:
            _replace(backbone, name, NF4Linear(layer))


def unpack_linear_layers(model: nn.Module) -> None:
    """Turn packed layers into plain ones, in place; the model computes what it did."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, NF4Linear):
            _replace(model, name, layer.unpacked())


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)

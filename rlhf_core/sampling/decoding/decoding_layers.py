"""Layers for decoding: adapters merged, heads held in float32, on a CPU packed weights and grouped attention.

They replace a model's own layers while it samples. Its own are left untouched and are put back afterwards, so a model
that has sampled is bit for bit what it was. What is computed differs by rounding where adapters are merged, weights are
packed as oneDNN orders them, or attention is grouped; ``ppo.sampler_agreement`` measures that in every rollout.
Elsewhere it is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.models.adapters.lora import adapted_layers
from rlhf_core.models.float32_head import Float32Linear
from rlhf_core.models.openblas_linear import is_plain_linear
from rlhf_core.sampling.decoding.grouped_attention import grouped_queries

# Packing rounds otherwise than a plain product and takes about as long as five steps of 16 rows: it is left to models,
# batches and replies where it pays.
PACKED_PARAMETERS = 10_000_000
PACKED_ROWS = 4
PACKED_STEPS = 16
PACKABLE = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Linear):
    """A linear layer without gradient that holds ``weight`` as oneDNN orders it for products with about ``rows`` rows.

    With the few rows of a decoding step it takes about half the time of a plain product, which reads its weight in an
    order made for many rows. Input and output are of the precision of ``weight``. The attribute ``weight`` is that of
    the layer it replaces, for models that look at its precision or device.
    """

    def __init__(self, replaced: nn.Linear, weight: Tensor, rows: int) -> None:
        super().__init__(replaced.in_features, replaced.out_features, bias=False, device="meta")
        self.weight, self.precision = replaced.weight, weight.dtype
        self.bias_values = None if replaced.bias is None else replaced.bias.detach().to(weight.dtype)
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        input = input.to(self.precision)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias_values, "none", [], "")
        return product


@contextmanager
def decoding_layers(model: PreTrainedModel, rows: int, steps: int) -> Iterator[None]:
    """Decode with merged, float32 and packed layers and grouped attention inside the block, each where it applies.

    Args:
        model: The model that samples. Its weights must not change inside the block.
        rows: Sequences of one decoding step.
        steps: Decoding steps of all batches inside the block, at most.
    """
    packed = packing_pays(model, rows, steps)
    replacements: dict[str, nn.Linear] = {}
    with torch.inference_mode():
        for name, layer, weight in _decoding_weights(model):
            if packed and weight.dtype in PACKABLE:
                replacements[name] = PackedLinear(layer, weight, rows)
            elif weight is not layer.weight:
                replacements[name] = _plain(layer, weight)
    originals = {name: model.get_submodule(name) for name in replacements}
    try:
        for name, layer in replacements.items():
            model.set_submodule(name, layer)
        with grouped_queries(model):
            yield
    finally:
        for name, original in originals.items():
            model.set_submodule(name, original)


def packing_pays(model: PreTrainedModel, rows: int, steps: int) -> bool:
    """Whether to pack the weights of ``model`` for ``steps`` decoding steps of ``rows`` sequences."""
    supported = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not supported or model.device.type != "cpu" or rows < PACKED_ROWS or steps < PACKED_STEPS:
        return False
    return sum(parameter.numel() for parameter in model.parameters()) >= PACKED_PARAMETERS


def _decoding_weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear, Tensor]]:
    """Every linear layer of ``model`` by name, with the weight that decoding uses in place of the layer's own.

    Adapters are merged into it, with one rounding to the layer's precision; heads that compute in float32 have it in
    float32. Layers in 4 bits and their adapters are left out: they are not to be unpacked as a whole.
    """
    adapted = dict(adapted_layers(model))
    inside = tuple(f"{name}." for name in adapted)
    for name, adapters in adapted.items():
        base = adapters.get_base_layer()
        if is_plain_linear(base):
            weight: Tensor = base.weight
            for adapter in () if adapters.disable_adapters else adapters.active_adapters:
                delta = adapters.get_delta_weight(adapter)
                weight = weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta
            yield name, base, weight.to(base.weight.dtype)
    for name, layer in model.named_modules():
        if type(layer) is Float32Linear:
            yield name, layer, layer.weight.float()
        elif is_plain_linear(layer) and not name.startswith(inside):
            yield name, layer, layer.weight


def _plain(replaced: nn.Linear, weight: Tensor) -> nn.Linear:
    """The layer of the same kind with another weight."""
    layer = type(replaced)(replaced.in_features, replaced.out_features, bias=False, device="meta")
    layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), replaced.bias
    return layer

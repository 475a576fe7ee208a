"""Layers for decoding: adapters merged, heads held in float32, on a CPU packed weights and grouped attention.

They replace a model's own layers while it samples. Its own are left untouched and are put back afterwards, so a model
that has sampled is bit for bit what it was. What is computed differs by rounding where adapters are merged, weights are
packed as oneDNN orders them, or attention is grouped; ``ppo.sampler_agreement`` measures that in every rollout.
Elsewhere it is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.models.adapters.lora import adapted_layers
from rlhf_core.models.float32_head import Float32Linear
from rlhf_core.models.openblas_linear import is_plain_linear
from rlhf_core.sampling.decoding.grouped_attention import decoding_attention
from rlhf_core.sampling.decoding.packed_linear import FusedProjection, PackedLinear

# Packing rounds otherwise than a plain product and takes about as long as five steps of 16 rows: it is left to models,
# batches and replies where it pays.
PACKED_PARAMETERS = 10_000_000
PACKED_ROWS = 4
PACKED_STEPS = 16
# Layers of one block that read the same input, as Llama and its relatives name them.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@contextmanager
def decoding_layers(model: PreTrainedModel, rows: int, steps: int) -> Iterator[None]:
    """Decode with merged, float32 and packed layers and grouped attention inside the block, each where it applies.

    Args:
        model: The model that samples. Its weights must not change inside the block.
        rows: Sequences of one decoding step.
        steps: Decoding steps of all batches inside the block, at most.
    """
    with torch.inference_mode():
        layers = dict(_decoded_layers(model))
        replacements = _packed(layers, rows) if packing_pays(model, rows, steps) else {}
        for name, layer in layers.items():
            if name not in replacements and layer.is_changed:
                replacements[name] = _plain(layer)
    originals = {name: model.get_submodule(name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            model.set_submodule(name, replacement)
        with decoding_attention(model):
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


@dataclass(frozen=True)
class _DecodedLayer:
    """A linear layer of the model, and which weight decoding uses in place of its own.

    Adapters are merged into it, with one rounding to the layer's precision; a head that computes in float32 has it in
    float32.
    """

    own: nn.Linear
    in_float32: bool = False
    adapted: Any = None
    adapters: tuple[str, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether the weight is another than the layer's own."""
        return bool(self.adapters) or (self.in_float32 and self.own.weight.dtype != torch.float32)

    @property
    def precision(self) -> torch.dtype:
        """That of the weight."""
        return torch.float32 if self.in_float32 else self.own.weight.dtype

    def weight(self) -> Tensor:
        """(out, in), computed anew where it is changed: all of them at once would take the model's memory again."""
        weight: Tensor = self.own.weight
        for adapter in self.adapters:
            delta = self.adapted.get_delta_weight(adapter)
            weight = weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta
        return weight.to(self.precision)


def _decoded_layers(model: PreTrainedModel) -> Iterator[tuple[str, _DecodedLayer]]:
    """Every linear layer of ``model`` by name, but layers in 4 bits: they are not to be unpacked as a whole."""
    adapted = dict(adapted_layers(model))
    inside = tuple(f"{name}." for name in adapted)
    for name, layer in adapted.items():
        if is_plain_linear(base := layer.get_base_layer()):
            adapters = () if layer.disable_adapters else tuple(layer.active_adapters)
            yield name, _DecodedLayer(base, adapted=layer, adapters=adapters)
    for name, layer in model.named_modules():
        if type(layer) is Float32Linear:
            yield name, _DecodedLayer(layer, in_float32=True)
        elif is_plain_linear(layer) and not name.startswith(inside):
            yield name, _DecodedLayer(layer)


def _packed(layers: Mapping[str, _DecodedLayer], rows: int) -> dict[str, nn.Linear]:
    """The layers that compute by packed weights, by name; those of the same input share one product."""
    packed: dict[str, nn.Linear] = {}
    packable = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # oneDNN refuses it on processors without AVX-512
        packable.append(torch.bfloat16)
    for name, layer in layers.items():
        if name in packed or layer.precision not in packable:
            continue
        names = _same_input(name, layers)
        own = [layers[member].own for member in names]
        shared = FusedProjection(own, [layers[member].weight() for member in names], rows)
        for position, member in enumerate(names):
            packed[member] = PackedLinear(own[position], shared, position)
    return packed


def _same_input(name: str, layers: Mapping[str, _DecodedLayer]) -> list[str]:
    """The names of all layers of the same block that read the input of layer ``name``, itself among them."""
    block, _, own = name.rpartition(".")
    for members in SAME_INPUT:
        names = [f"{block}.{member}" for member in members]
        if own in members and all(member in layers for member in names):
            kinds = {(layers[member].precision, layers[member].own.in_features) for member in names}
            return names if len(kinds) == 1 else [name]
    return [name]


def _plain(layer: _DecodedLayer) -> nn.Linear:
    """A layer of the same kind with the weight for decoding."""
    plain = type(layer.own)(layer.own.in_features, layer.own.out_features, bias=False, device="meta")
    plain.weight, plain.bias = nn.Parameter(layer.weight(), requires_grad=False), layer.own.bias
    return plain

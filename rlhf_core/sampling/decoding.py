"""Faster layers while replies are sampled.

Adapters are merged, heads compute in float32, and each device gets what is fast there.

They replace a model's own layers while it samples. Its own are left untouched and are put back
afterwards, so a model that has sampled is bit for bit what it was. What is computed differs by
rounding where adapters are merged, weights are packed as oneDNN orders them, or attention is
grouped or made of products; ``ppo.sampler_agreement`` measures that in every rollout. Elsewhere it
is the same to the bit.

On a CPU weights are packed in the order in which oneDNN multiplies few rows fastest: products of
the few rows of a decoding step take about half the time. Layers of the same input, as queries, keys
and values have, are one product. Attention of one new token in bfloat16 or float16, where several
query heads share keys and values, passes the queries that share a head as so many positions, which
is the same sum: PyTorch's kernel treats each head by itself and takes up to eight times as long. In
float32, and where a mask is passed, it is as fast either way or transformers does so itself
(Ainslie et al., 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
Checkpoints"). On a GPU attention of one token to a buffer of keys is two batched products with the
softmax between: PyTorch's kernel for masks takes longer, and those without look at the whole
buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_core.models.adapters import adapted_layers, merged_weight
from rlhf_core.models.kernels import is_plain_linear
from rlhf_core.models.precision import LOW_PRECISION, Float32Linear

CPU_NAME = "rlhf_grouped_sdpa"
GPU_NAME = "rlhf_sdpa"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend with the queries that share keys as so many positions.

    (B, H, 1, D) queries, (B, K, L, D) keys and values -> (B, 1, H, D); anything else as
    transformers computes it.
    """
    batch, heads, positions, width = query.shape
    key_heads = key.shape[1]
    is_special = attention_mask is not None or _is_given(settings, "position_bias", "cache")
    if positions > 1 or is_special or heads == key_heads:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    grouped = query.reshape(batch, key_heads, -1, width)
    scaling = settings.get("scaling")
    attended = nn.functional.scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return attended.reshape(batch, 1, heads, width), None


def attention_by_products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend by two matrix products.

    (B, H, 1, D) queries, (B, K, L, D) keys and values, a mask (B, 1, 1, L) that is added to scores
    -> (B, 1, H, D).

    Scores and weights are float32 until the weights meet the values. Anything else as transformers
    computes it.
    """
    batch, heads, positions, width = query.shape
    is_special = _is_given(settings, "position_bias", "cache", "softcap", "s_aux")
    if (
        positions > 1
        or is_special
        or query.dtype != torch.bfloat16
        or attention_mask is None
        or not attention_mask.is_floating_point()
        or attention_mask.shape[1] != 1
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    key_heads = key.shape[1]
    shared = batch * key_heads
    queries = query.reshape(shared, -1, width)
    keys = key.reshape(shared, -1, width)
    values = value.reshape(shared, -1, value.shape[-1])
    tokens = keys.shape[1]
    scores = torch.bmm(queries, keys.mT, out_dtype=torch.float32)
    scores = scores.view(batch, key_heads, -1, tokens)
    scaling = settings.get("scaling") or width**-0.5
    scores = torch.add(attention_mask, scores, alpha=scaling)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    weights = weights.view(shared, -1, tokens)
    attended = torch.bmm(weights, values)
    return attended.view(batch, 1, heads, -1), None


def _is_given(settings: Mapping[str, Any], *names: str) -> bool:
    return any(settings.get(name) is not None for name in names)


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use the attention that is fastest in decoding inside the block.

    On a CPU it is grouped; on a GPU it takes masks that nothing waits for.
    """
    if model.device.type != "cpu":
        name = GPU_NAME
    elif model.dtype in LOW_PRECISION:
        name = CPU_NAME
    else:
        yield
        return
    changed: list[Any] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        is_known = any(config is one for one in changed)
        if implementation == "sdpa" and not is_known:
            changed.append(config)
    if changed:
        AttentionInterface.register(CPU_NAME, grouped_attention)
        AttentionMaskInterface.register(CPU_NAME, sdpa_mask)
        AttentionInterface.register(GPU_NAME, attention_by_products)
        AttentionMaskInterface.register(GPU_NAME, mask_without_look)
    try:
        for config in changed:
            # The empty name stands for the configuration itself, without those of its parts.
            config._attn_implementation = {"": name}
        yield
    finally:
        for config in changed:
            config._attn_implementation = {"": "sdpa"}


def mask_without_look(*args: Any, **settings: Any) -> Tensor | None:
    """transformers' mask, made whether or not a row is padded.

    To find out, the host would wait at every token.
    """
    if settings.get("attention_mask") is not None:
        settings["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **settings)


class FusedProjection:
    """The weights of linear layers with the same input, packed as one.

    The packing is for products with about ``rows`` rows.

    Args:
        layers: The layers, for their biases.
        weights: Their weights (out, in), all of one precision, which inputs are converted to.
        rows: Rows of a decoding step.
    """

    def __init__(self, layers: Sequence[nn.Linear], weights: Sequence[Tensor], rows: int) -> None:
        self.precision = weights[0].dtype
        self.widths = [len(weight) for weight in weights]
        whole = weights[0]
        if len(weights) > 1:
            whole = torch.cat(list(weights))
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(whole.detach(), rows)
        self.bias: Tensor | None = None
        if any(layer.bias is not None for layer in layers):
            biases = []
            for layer, weight in zip(layers, weights, strict=True):
                bias = layer.bias
                if bias is None:
                    bias = weight.new_zeros(len(weight))
                biases.append(bias.detach().to(self.precision))
            self.bias = torch.cat(biases)
        # Of the calling thread, so that two that sample with one model cannot take each other's.
        self._last = threading.local()

    def product(self, input: Tensor, position: int) -> Tensor:
        """(..., in) -> (..., out) of the layer at ``position``.

        The first one called computes for all of them, and those after it take that where they are
        called with the same tensor, which nothing must have changed meanwhile. In another order, or
        with other tensors, all is computed again: slower, but the same values.
        """
        held = getattr(self._last, "held", None)
        if held is not None and held[0] is input:
            products: tuple[Tensor, ...] = held[1]
        else:
            converted = input.to(self.precision)
            rows = torch.ops.mkldnn._linear_pointwise(
                converted, self.packed, self.bias, "none", [], ""
            )
            products = rows.split(self.widths, dim=-1)
        self._last.held = (input, products)
        if position + 1 == len(self.widths):  # the last one that takes it
            self._last.held = None
        return products[position]


class PackedLinear(nn.Linear):
    """A linear layer that computes by a :class:`FusedProjection`, without gradient.

    It has the precision of that.

    The attribute ``weight`` is that of the layer it replaces, for models that look at its precision
    or device.
    """

    def __init__(self, replaced: nn.Linear, shared: FusedProjection, position: int) -> None:
        super().__init__(replaced.in_features, replaced.out_features, bias=False, device="meta")
        self.weight = replaced.weight
        self.shared = shared
        self.position = position

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.shared.product(input, self.position)


# Packing rounds differently from a plain product and takes about as long as five steps of 16 rows,
# so it is used where model, batch and replies are large enough to pay for it.
PACKED_PARAMETERS = 10_000_000
PACKED_ROWS = 4
PACKED_STEPS = 16
# Layers of one block that read the same input, as Llama and its relatives name them.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@contextmanager
def decoding_layers(model: PreTrainedModel, rows: int, steps: int) -> Iterator[None]:
    """Replace the model's layers inside the block by those that decode fastest.

    They are merged, float32 and packed layers and grouped attention, each where it applies.

    Args:
        model: The model that samples. Its weights must not change inside the block.
        rows: Sequences of one decoding step.
        steps: Decoding steps of all batches inside the block, at most.
    """
    with torch.inference_mode():
        layers = dict(_decoded_layers(model))
        replacements: dict[str, nn.Module] = {}
        if packing_pays(model, rows, steps):
            replacements |= _packed(layers, rows)
        for name, layer in layers.items():
            own = layer.own
            is_changed = layer.adapted is not None or layer.precision != own.weight.dtype
            if is_changed and name not in replacements:
                kind = type(own)
                plain = kind(own.in_features, own.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(layer.weight(), requires_grad=False)
                plain.bias = own.bias
                replacements[name] = plain
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
    """Whether packing pays for ``steps`` decoding steps of ``rows`` sequences."""
    if not torch.backends.mkldnn.is_available() or model.device.type != "cpu":
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if rows < PACKED_ROWS or steps < PACKED_STEPS:
        return False
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters >= PACKED_PARAMETERS


@dataclass(frozen=True)
class _DecodedLayer:
    """A linear layer, its precision in decoding, and the layer of its adapters.

    The precision is float32 for a head that computes so.

    These are merged into the weight.
    """

    own: nn.Linear
    precision: torch.dtype
    adapted: Any = None

    def weight(self) -> Tensor:
        """(out, in), computed anew where it is changed.

        All of them at once would take the model's memory again.
        """
        weight = self.own.weight
        if self.adapted is not None:
            weight = merged_weight(self.adapted)
        return weight.to(self.precision)


def _decoded_layers(model: PreTrainedModel) -> Iterator[tuple[str, _DecodedLayer]]:
    """Every linear layer of ``model`` by name, but layers in 4 bits.

    They are not to be unpacked as a whole.
    """
    adapted = dict(adapted_layers(model))
    inside = tuple(f"{name}." for name in adapted)
    for name, layer in adapted.items():
        base = layer.get_base_layer()
        if is_plain_linear(base):
            is_active = not layer.disable_adapters and layer.active_adapters
            merged = layer if is_active else None
            yield name, _DecodedLayer(base, base.weight.dtype, merged)
    for name, layer in model.named_modules():
        if type(layer) is Float32Linear:
            yield name, _DecodedLayer(layer, torch.float32)
        elif is_plain_linear(layer) and not name.startswith(inside):
            yield name, _DecodedLayer(layer, layer.weight.dtype)


def _packed(layers: Mapping[str, _DecodedLayer], rows: int) -> dict[str, nn.Linear]:
    """The layers that compute by packed weights, by name.

    Those of the same input share one product.
    """
    packed: dict[str, nn.Linear] = {}
    packable = [torch.float32]
    # oneDNN refuses it on processors without AVX-512.
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packable.append(torch.bfloat16)
    for name, layer in layers.items():
        if name in packed or layer.precision not in packable:
            continue
        names = _same_input(name, layers)
        own = [layers[member].own for member in names]
        weights = [layers[member].weight() for member in names]
        shared = FusedProjection(own, weights, rows)
        for position, member in enumerate(names):
            packed[member] = PackedLinear(own[position], shared, position)
    return packed


def _same_input(name: str, layers: Mapping[str, _DecodedLayer]) -> list[str]:
    """The names of all layers of a block that read the same input as layer ``name``."""
    block = name.rpartition(".")[0]
    for members in SAME_INPUT:
        names = [f"{block}.{member}" for member in members]
        if name not in names or not layers.keys() >= set(names):
            continue
        found = [layers[member] for member in names]
        precisions = {layer.precision for layer in found}
        widths = {layer.own.in_features for layer in found}
        if len(precisions) == len(widths) == 1:
            return names
    return [name]

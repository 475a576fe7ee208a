"""Bytes of activations of a Llama-like decoder as transformers computes it (RMSNorm, rotary positions, SwiGLU).

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, whose
formula is for LayerNorm, GeLU and multi-head attention with drop-out; here, counted per token and layer from what
autograd keeps (H hidden, Q query width, K key/value width, F feed-forward, A heads, e bytes of an element):

- each of two norms: its input in float32, the normalised input and the output: ``(4 + 2e) H``, and 4 for the spread
- attention: queries, output, keys and values ``4Q`` (with grouped queries keys and values are repeated, since a padded
  batch has a mask), the kernel's log-sum-exp 4A; ``eager`` keeps the matrix of scores instead: A per token of the row
- SwiGLU: gate before and after its activation, up, their product: ``4F``

The mask of a padded batch is converted to numbers once per layer: e per token of the row, for each token.
"""

from __future__ import annotations

from rlhf_core.memory.lengths import Batch
from rlhf_core.memory.placement import Placement
from rlhf_core.memory.shapes import Shape


def kept_by_layer(shape: Shape, batch: Batch, placement: Placement, adapted: bool) -> int:
    """What one layer keeps for its backward pass."""
    e = placement.element
    per_token = _kept_with_adapters(shape, e) if adapted else _kept_by_maps_and_norms(shape, e)
    # Queries, output, and keys and values, which are repeated to the queries' heads wherever there is a mask.
    per_token += e * 4 * shape.query_width
    if placement.attention == "eager":
        scores = shape.heads * batch.width * (4 if e == 4 else 4 + e)
    else:
        scores = 4 * shape.heads + batch.width * e
    return batch.tokens * (per_token + scores)


def _kept_by_maps_and_norms(shape: Shape, e: int) -> int:
    return 2 * (shape.hidden * (4 + 2 * e) + 4) + e * 4 * shape.intermediate


def _kept_with_adapters(shape: Shape, e: int) -> int:
    """Frozen maps and norms keep no input of their own; the adapters' A maps keep the norms' outputs and SwiGLU's."""
    norms = 2 * (shape.hidden * (4 + e) + 4)
    return norms + e * 4 * shape.intermediate


def kept_by_layers(shape: Shape, batch: Batch, placement: Placement, adapted: bool) -> int:
    """What all layers keep, and the mask. With gradient checkpointing each layer keeps its input alone."""
    mask = batch.tokens * batch.width
    if placement.gradient_checkpointing:
        return shape.layers * batch.tokens * shape.hidden * placement.element + mask
    return shape.layers * kept_by_layer(shape, batch, placement, adapted) + mask


def kept_by_last_norm(shape: Shape, batch: Batch, placement: Placement) -> int:
    """What the norm after the last layer keeps."""
    return batch.tokens * (shape.hidden * (4 + 2 * placement.element) + 4)


def forward_working_set(shape: Shape, batch: Batch, placement: Placement) -> int:
    """The most that a pass without gradient holds at a time: one layer at work, with the mask and the rotations.

    In SwiGLU the embeddings, the layer's input, the stream, its norm (4H) and three of width F; in attention 3H and the
    queries and keys before, during and after their rotation.
    """
    e = placement.element
    feed_forward = batch.tokens * e * (4 * shape.hidden + 3 * shape.intermediate)
    attention = batch.tokens * e * (3 * shape.hidden + 4 * shape.query_width + 2 * shape.kv_width)
    if placement.attention == "eager":
        attention += batch.tokens * shape.heads * batch.width * (8 if e == 4 else 10)
    else:
        attention += batch.tokens * batch.width * e
    rotations = 2 * batch.tokens * shape.head_dim * e
    return max(feed_forward, attention) + batch.tokens * batch.width + rotations


def norm_backward(shape: Shape, batch: Batch) -> int:
    """What the backward pass of a norm holds on top of what was kept: three float32 tensors of width H."""
    return batch.tokens * 4 * 3 * shape.hidden


def swiglu_backward(shape: Shape, batch: Batch, placement: Placement) -> int:
    """What the backward pass of a layer holds on top of what was kept: the stream's gradient (H), two of width F."""
    return batch.tokens * placement.element * (2 * shape.intermediate + shape.hidden)

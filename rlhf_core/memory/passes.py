"""The peak of one pass of a model: each candidate moment is a place where this project's code holds most at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_core.memory import logits
from rlhf_core.memory.activations import (
    forward_working_set,
    kept_by_last_norm,
    kept_by_layer,
    kept_by_layers,
    norm_backward,
    swiglu_backward,
)
from rlhf_core.memory.kv_cache import growing_copy, kv_cache
from rlhf_core.memory.lengths import Batch
from rlhf_core.memory.placement import Placement
from rlhf_core.memory.roles import Role
from rlhf_core.memory.shapes import Shape
from rlhf_core.memory.usage import Use, peak


@dataclass(frozen=True)
class Loss:
    """What the loss does with logits. ``copies``: float32 tensors at its backward peak, 0 for a scalar model.

    ``held``: the caller keeps one to the end. ``changed``: a temperature or a forbidden end makes another one.
    """

    copies: int = 0
    held: bool = False
    changed: bool = False


CROSS_ENTROPY = Loss(copies=3)
SCALAR = Loss()


def training_pass(shape: Shape, batch: Batch, model: Role, loss: Loss, accumulated: bool) -> Use:
    """Forward and backward of one micro-batch. ``accumulated``: the gradients of an earlier one are there already.

    The embedding's gradient is dense; with tied embeddings the unembedding's waits until the pass ends, and both stand
    beside their sum.
    """
    place, gradients = model.placement, model.gradients
    one_layer = kept_by_layer(shape, batch, place, model.adapted)
    layers = kept_by_layers(shape, batch, place, model.adapted)
    last_norm = kept_by_last_norm(shape, batch, place)
    again = one_layer if place.gradient_checkpointing else 0
    before = gradients if accumulated else 0
    held = logits.one_copy(shape, batch.scored) if loss.held else 0
    table = 0 if model.adapted else shape.embedding * place.element
    unembedding = table if loss.copies else 0
    waiting = unembedding if shape.tied else 0
    below = Use(logits=held, gradients=before, other=waiting if accumulated else unembedding)
    swiglu = swiglu_backward(shape, batch, place)
    of_a_layer = gradients // shape.layers if model.adapted else shape.layer * place.element
    first_layer = Use(logits=held, other=waiting, activations=one_layer + swiglu)
    return peak(
        [
            below + Use(activations=layers + last_norm + norm_backward(shape, batch)),
            below + Use(activations=layers + again + swiglu),
            first_layer.with_gradients(gradients if accumulated else max(gradients - table - of_a_layer, 0)),
            Use(logits=held, gradients=gradients, other=(table if accumulated else 0) + 2 * waiting),
            *_at_loss(shape, batch, place, loss, Use(activations=layers + last_norm, gradients=before), unembedding),
        ]
    )


def _at_loss(
    shape: Shape, batch: Batch, placement: Placement, loss: Loss, kept: Use, unembedding: int
) -> Iterator[Use]:
    """Moments of the unembedding: its forward pass, the loss's backward pass, and the gradient of its weights."""
    if not loss.copies:
        return
    copy = logits.one_copy(shape, batch.scored)
    gradient = batch.scored * shape.vocabulary * placement.element
    yield kept + Use(logits=logits.forward_copies(shape, batch.scored, placement, loss.changed))
    yield kept + Use(logits=loss.copies * copy)
    yield kept + Use(logits=(copy if loss.held else 0) + gradient, other=unembedding)


def plain_pass(shape: Shape, batch: Batch, placement: Placement, changed: bool = False) -> Use:
    """A pass without gradient: layers at work, or logits where some are computed."""
    hidden = batch.tokens * shape.hidden * placement.element
    return peak(
        [
            Use(activations=forward_working_set(shape, batch, placement)),
            Use(activations=hidden, logits=logits.forward_copies(shape, batch.scored, placement, changed)),
        ]
    )


def sampling_pass(shape: Shape, rows: int, prompt: int, reply: int, placement: Placement) -> Use:
    """Sampling ``rows`` replies at once: reading the prompts, or the last token of full-length replies."""
    return _decoding(shape, rows, prompt, reply, placement, logits.sampler(shape, rows, placement))


def filtered_sampling_pass(shape: Shape, rows: int, prompt: int, reply: int, placement: Placement) -> Use:
    """The same with the evaluation filters, which sort the vocabulary."""
    return _decoding(shape, rows, prompt, reply, placement, logits.filters(shape, rows, placement))


def _decoding(shape: Shape, rows: int, prompt: int, reply: int, placement: Placement, sampler: int) -> Use:
    width = prompt + reply
    start = Use(
        activations=forward_working_set(shape, Batch(rows, prompt), placement),
        kv_cache=kv_cache(shape, rows, prompt, placement),
    )
    full = Use(
        kv_cache=kv_cache(shape, rows, width, placement),
        logits=sampler,
        other=growing_copy(shape, rows, width, placement),
    )
    return peak([start, full])


def scoring_pass(shape: Shape, batch: Batch, placement: Placement, same: bool, changed: bool) -> Use:
    """Policy, reference and critic over one micro-batch of rollouts without gradient; ``same``: the policy is its own
    reference. Log-probabilities of both are still there while the critic runs."""
    copy = logits.one_copy(shape, batch.scored)
    working = forward_working_set(shape, batch, placement)
    found = 1 if same else 2
    forward = logits.forward_copies(shape, batch.scored, placement, changed)
    return peak(
        [
            Use(logits=logits.scoring_copies(same) * copy),
            Use(logits=(found - 1) * copy + forward),
            Use(activations=working, logits=found * copy),
        ]
    )


def rollout_tensors(rows: int, prompt: int, reply: int) -> Use:
    """Tokens and masks (int64, twice: the sampler's and the plain copy) and some twenty (B, T) float32 tensors."""
    return Use(other=rows * ((prompt + reply) * 8 * 2 * 2 + reply * 4 * 20))

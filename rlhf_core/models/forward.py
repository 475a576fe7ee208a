"""Forward passes: positions from masks, and logits at chosen positions only, a part at a time.

With a vocabulary of 152,000 the float32 logits of 4,096 positions take 2.5 GB, and their softmax
and its gradient as much again. What losses and metrics need of them is a few numbers per position,
so it is computed in chunks of positions whose logits are dropped at once and recomputed in the
backward pass (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", avoids
them in the same way within one kernel).

Shapes: N positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf_core.config.operations import DEFAULT_LOGITS_MIB, MIB
from rlhf_core.models.architecture import (
    arguments_of,
    backbone_of,
    has_plain_head,
    is_sharded,
    router_loss_weight,
    vocabulary_of,
)
from rlhf_core.models.precision import Float32Linear
from rlhf_core.runtime import distributed

# Float32 logits that exist at once where nothing else is asked for.
LOGITS_BYTES = DEFAULT_LOGITS_MIB * MIB
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LazyLogits:
    """Logits (..., V) that are computed on demand.

    Attributes:
        states: Hidden states (..., H). Of a model that does more to its logits than unembed they
            are the logits.
        head: Makes logits (..., V) of hidden states.
        vocabulary: V.
        router_loss: The weighted auxiliary loss of the pass's routers, where that was asked for;
            see :func:`router_loss_weight`.
        sharded: Whether the ranks gather the head's weight together in every call.
    """

    states: Tensor
    head: Head
    vocabulary: int
    router_loss: Tensor | None = None
    sharded: bool = False

    def whole(self) -> Tensor:
        """All logits at once (..., V)."""
        return self.head(self.states)

    def chunks(self, limit: int, other: LazyLogits | None = None) -> int:
        """Split the positions into parts with at most ``limit`` bytes of float32 logits.

        Where a head is sharded, all ranks call it as often as the one that needs most parts.

        Args:
            limit: Bytes of one part.
            other: Logits of a second model that are made in the same parts.
        """
        count = chunk_count(math.prod(self.states.shape[:-1]), self.vocabulary, limit)
        together = self.sharded or (other is not None and other.sharded)
        return distributed.largest_of_ranks(count) if together else count

    def repeatable_head(self) -> Head:
        """The head for many calls: what does not change between them is made once."""
        return self.head.repeatable() if isinstance(self.head, Float32Linear) else self.head


def chunk_count(positions: int, vocabulary: int, limit: int) -> int:
    """Split ``positions`` into parts of one or more with at most ``limit`` bytes of float32 logits."""
    count = min(math.ceil(4 * positions * vocabulary / limit), positions)
    return max(count, 1)


def compute_in_chunks(
    compute: Callable[..., tuple[Tensor, ...]], columns: Sequence[Tensor], count: int
) -> tuple[Tensor, ...]:
    """Run ``compute`` on ``count`` parts of the columns' rows, and join its results.

    Args:
        compute: (n, ...) of each column -> tensors of n rows. What it holds in between is not kept
            for the backward pass, in which it runs again.
        columns: Tensors of N rows.
        count: Number of parts; they differ by one row at most, and are empty where there are more
            parts than rows.
    """
    if torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    parts = zip(*(column.tensor_split(count) for column in columns), strict=True)
    results = [compute(*part) for part in parts]
    return tuple(torch.cat(column) for column in zip(*results, strict=True))


Result = TypeVar("Result")


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions counted from the first real token, so that the padding side changes nothing.

    Shapes: (B, L) -> (B, L).
    """
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def right_padded(attention_mask: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return mask (B, L) and positions for rows that begin in the first column.

    On a GPU the mask is None.

    No token sees those after it, so that padding on the right needs no mask, and without one
    attention takes its fastest kernel, and the host does not wait to see whether a row is padded.
    On a CPU that kernel would round otherwise. Positions rise to the end there: transformers takes
    others for several texts in one row.
    """
    if attention_mask.device.type == "cpu":
        return attention_mask, position_ids_from_mask(attention_mask)
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return None, columns.expand_as(attention_mask)


def last_token_indices(attention_mask: Tensor) -> Tensor:
    """Column of the last real token of each row, whichever side is padded: (B, L) -> (B,)."""
    columns = attention_mask.new_ones(attention_mask.shape).cumsum(dim=1)
    return (columns * attention_mask).argmax(dim=1)


def hidden_states(
    backbone: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Last hidden states of a backbone without its head: (B, L) -> (B, L, H).

    Without a mask it needs positions.
    """
    if position_ids is None:
        assert attention_mask is not None
        position_ids = position_ids_from_mask(attention_mask)
    given = {"attention_mask": attention_mask, "position_ids": position_ids}
    output = backbone(**arguments_of(backbone, input_ids=input_ids, **given))
    hidden: Tensor = output.last_hidden_state
    return hidden


def selected_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    select: Tensor,
    router_loss: bool = False,
) -> LazyLogits:
    """Next-token logits of a causal LM at the positions that ``select`` (bool, B, L) names.

    Shapes: (N, V), in row-major order.

    Rows are padded on the right.
    Only the N selected hidden states are unembedded: with prompts masked that is a third to a half
    of the work of a small model with a large vocabulary.

    Args:
        router_loss: Whether a pass with gradients computes the auxiliary loss of the routers, too.
    """
    if router_loss and torch.is_grad_enabled() and router_loss_weight(model):
        logits = _logits_and_router_loss(model, input_ids, attention_mask)
    else:
        logits = lazy_logits(model, input_ids, *right_padded(attention_mask), input_ids.shape[1])
    return replace(logits, states=logits.states[select])


def _logits_and_router_loss(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor
) -> LazyLogits:
    """Compute the logits of all positions and the auxiliary loss of the real tokens.

    The loss is that of the model's own forward.
    """
    states: list[Tensor] = []

    def keep_states(module: nn.Module, inputs: Any, output: Any) -> None:
        states.append(output.last_hidden_state)

    plain = has_plain_head(model)
    hook = backbone_of(model).register_forward_hook(keep_states)
    given: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids_from_mask(attention_mask),
        "output_router_logits": True,
        # Of a plain head the logits are made later, of the states.
        "logits_to_keep": 1 if plain else input_ids.shape[1],
    }
    try:
        output = model(**arguments_of(model, **given))
    finally:
        hook.remove()
    made = (
        unembedded(model, states[0])
        if plain
        else LazyLogits(output.logits, nn.Identity(), output.logits.shape[-1])
    )
    loss = getattr(output, "aux_loss", None)
    return replace(made, router_loss=None if loss is None else router_loss_weight(model) * loss)


def lazy_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    keep: int,
) -> LazyLogits:
    """Next-token logits of a causal LM at the last ``keep`` positions.

    Shapes: (B, L) three times -> (B, keep, V).

    The model may be wrapped: the reference is a policy with its adapters off, or a model whose
    weights are sharded.
    """
    if has_plain_head(model):
        backbone = partial(
            hidden_states, backbone_of(model), input_ids, attention_mask, position_ids
        )
        hidden = run_as_wrapped(model, backbone)
        # A slice of all would cost another tensor of their size in the backward pass.
        return unembedded(model, hidden if keep == hidden.shape[1] else hidden[:, -keep:])
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "logits_to_keep": keep}
    logits: Tensor = model(**arguments_of(model, input_ids=input_ids, **given)).logits
    logits = logits if logits.shape[1] == keep else logits[:, -keep:]
    return LazyLogits(logits, nn.Identity(), logits.shape[-1])


def unembedded(model: PreTrainedModel, hidden: Tensor) -> LazyLogits:
    """Logits (..., V) of the last hidden states (..., H) of a causal LM with a plain head."""
    sharded = is_sharded(next(model.parameters()))  # ZeRO 3 divides all weights
    return LazyLogits(hidden, model.get_output_embeddings(), vocabulary_of(model), sharded=sharded)


def run_as_wrapped(model: PreTrainedModel, compute: Callable[[], Result]) -> Result:
    """Run ``compute``, a pass of parts of a language model, as the model's wrapper demands."""
    run: Callable[[Callable[[], Result]], Result] | None = getattr(model, "run", None)
    return compute() if run is None else run(compute)

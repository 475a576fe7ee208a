"""Passes over sampled replies: logits and values of response positions. Shapes: B sequences, P prompt width
(left-padded), T response width (right-padded), V vocabulary. The state before response token t is the hidden state at
P + t - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.data.sharding import passes
from rlhf_core.models.actor_critic import ActorCritic
from rlhf_core.models.forward import lazy_logits, position_ids_from_mask
from rlhf_core.models.lazy_logits import LazyLogits

MICRO_BATCH = 16


class TokenScorer(Protocol):
    """A model with one scalar at every position: a critic."""

    def token_scores(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, reply_mask: Tensor
    ) -> Tensor:
        """(B, L) four times -> scalar at every position (B, L)."""


@dataclass(frozen=True)
class Tokens:
    """What a model needs to see of a batch."""

    tokens: Tensor  # (B, P+T)
    attention_mask: Tensor  # (B, P+T)
    response_mask: Tensor  # (B, T)

    @property
    def width(self) -> int:
        """T."""
        return self.response_mask.shape[1]

    @property
    def response(self) -> Tensor:
        """Response token ids (B, T)."""
        return self.tokens[:, self.tokens.shape[1] - self.width :]

    @property
    def position_ids(self) -> Tensor:
        """(B, P+T), counted from the first real token, so that padding never changes a number."""
        return position_ids_from_mask(self.attention_mask)

    @property
    def reply_mask(self) -> Tensor:
        """1 at the response's tokens among all columns (B, P+T)."""
        prompt = self.tokens.shape[1] - self.width
        return torch.nn.functional.pad(self.response_mask.long(), (prompt, 0))

    @property
    def real_positions(self) -> Tensor:
        """Numbers of the response's tokens among the B * T response positions, row by row (N,)."""
        return self.response_mask.flatten().nonzero().squeeze(1)

    def part(self, rows: Tensor) -> Tokens:
        """The given rows, with the padding that they do not need cut off on both sides."""
        attention, mask = self.attention_mask[rows], self.response_mask[rows]
        width = max(int(mask.sum(dim=1).max()), 1)
        prompt = attention.shape[1] - self.width
        start = prompt - max(int(attention[:, :prompt].sum(dim=1).max()), 1)
        span = slice(start, prompt + width)
        return Tokens(self.tokens[rows][:, span], attention[:, span], mask[:, :width])


def micro_batches(attention_mask: Tensor, size: int | None) -> Iterator[Tensor]:
    """Row numbers in parts of at most ``size`` (16 for ``None``), rows of similar length together.

    Sorted small parts carry little padding, which makes them faster than one large batch.
    """
    order = attention_mask.sum(dim=1).argsort(stable=True)
    yield from order.split(size or MICRO_BATCH)


def shared_micro_batches(attention_mask: Tensor, size: int | None) -> Iterator[tuple[Tensor, float]]:
    """This rank's part of :func:`micro_batches`, each with the weight of its terms (see ``data.sharding.passes``)."""
    yield from passes(attention_mask.sum(dim=1).argsort(stable=True), size or MICRO_BATCH)


def response_logits(model: PreTrainedModel, batch: Tokens) -> LazyLogits:
    """Logits at the positions before each response token and at the last one: (B, T + 1, V)."""
    return lazy_logits(model, batch.tokens, batch.attention_mask, batch.position_ids, batch.width + 1)


def logits_and_values(model: ActorCritic, batch: Tokens) -> tuple[LazyLogits, Tensor]:
    """:func:`response_logits` (B, T + 1, V) and :func:`response_values` (B, T), in one pass of the backbone."""
    logits, scores = model(batch.tokens, batch.attention_mask, batch.position_ids, logits_to_keep=batch.width + 1)
    return logits, scores[:, -batch.width - 1 : -1]


def response_values(critic: TokenScorer, batch: Tokens) -> Tensor:
    """Value of the state *before* each response token: (B, T)."""
    scores = critic.token_scores(batch.tokens, batch.attention_mask, batch.position_ids, batch.reply_mask)
    prompt = batch.tokens.shape[1] - batch.width
    return scores[:, prompt - 1 : -1]


def pad_columns(values: Tensor, width: int) -> Tensor:
    """Zeros appended to reach ``width`` columns: (b, t) -> (b, width)."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))

"""Passes over sampled replies: logits and values of response positions. Shapes: B sequences, P prompt width
(left-padded), T response width (right-padded), V vocabulary. The state before response token t is the hidden state at
P + t - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.forward import has_plain_head, lazy_logits, position_ids_from_mask
from rlhf_core.models.heads.actor_critic import ActorCritic
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
    """What a model needs to see of a batch.

    Attributes:
        tokens: (B, L). Prompts are padded on the left and replies on the right, L being P + T, unless there are
            ``reply_starts``.
        attention_mask: (B, L).
        response_mask: (B, T).
        reply_starts: Column of each reply's first token (B,), where rows begin in the first column. None otherwise.
        shortest_prompt: The least of ``reply_starts``, known without waiting for a GPU.
    """

    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    reply_starts: Tensor | None = None
    shortest_prompt: int = 1

    @property
    def width(self) -> int:
        """T."""
        return self.response_mask.shape[1]

    @property
    def response(self) -> Tensor:
        """Response token ids (B, T)."""
        if self.reply_starts is not None:
            return self.tokens.gather(1, self._reply_columns(0, self.width))
        return self.tokens[:, self.tokens.shape[1] - self.width :]

    @property
    def position_ids(self) -> Tensor:
        """(B, L), counted from the first real token, so that padding never changes a number."""
        return position_ids_from_mask(self.attention_mask)

    @property
    def reply_mask(self) -> Tensor:
        """1 at the response's tokens among all columns (B, L)."""
        if self.reply_starts is not None:
            columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
            return self.attention_mask.long() * (columns >= self.reply_starts.unsqueeze(1))
        prompt = self.tokens.shape[1] - self.width
        return torch.nn.functional.pad(self.response_mask.long(), (prompt, 0))

    @property
    def real_positions(self) -> Tensor:
        """Numbers of the response's tokens among the B * T response positions, row by row (N,)."""
        return self.response_mask.flatten().nonzero().squeeze(1)

    def lengths(self) -> tuple[list[int], list[int]]:
        """Real tokens of each prompt and of each response."""
        replies = self.response_mask.sum(dim=1)
        prompts = self.attention_mask.sum(dim=1) - replies
        prompt_list, reply_list = torch.stack((prompts, replies)).tolist()
        return prompt_list, reply_list

    def before_and_at_replies(self, values: Tensor) -> Tensor:
        """What is before each response token, and at the last position: (B, L, ...) -> (B, T + 1, ...).

        Columns before all of these may be left out of ``values``.
        """
        if self.reply_starts is None:
            return values[:, values.shape[1] - self.width - 1 :]
        columns = self._reply_columns(-1, self.width + 1) - (self.tokens.shape[1] - values.shape[1])
        return values[torch.arange(len(values), device=values.device).unsqueeze(1), columns]

    def part(self, rows: Tensor) -> Tokens:
        """The given rows, with the padding that they do not need cut off on both sides."""
        prompts, replies = Tokens(self.tokens[rows], self.attention_mask[rows], self.response_mask[rows]).lengths()
        return self.cut(rows, max(1, *prompts), max(1, *replies))

    def cut(self, rows: Tensor, prompt: int, reply: int) -> Tokens:
        """The given rows, cut to ``prompt`` columns of prompts and ``reply`` columns of replies."""
        end = self.tokens.shape[1] - self.width
        span = slice(end - prompt, end + reply)
        mask = self.response_mask[rows][:, :reply]
        return Tokens(self.tokens[rows][:, span], self.attention_mask[rows][:, span], mask)

    def compact(self, rows: Tensor, width: int, reply: int, shortest_prompt: int) -> Tokens:
        """The given rows in ``width`` columns, each beginning in the first, with ``reply`` response positions.

        No prompt is shorter than ``shortest_prompt``, which is at least one token.
        """
        attention, mask = self.attention_mask[rows], self.response_mask[rows][:, :reply]
        lengths = attention.sum(dim=1)
        starts = lengths - mask.sum(dim=1)
        columns = torch.arange(width, device=rows.device).unsqueeze(0)
        first = (self.tokens.shape[1] - self.width - starts).unsqueeze(1)
        source = (first + columns).clamp(max=self.tokens.shape[1] - 1)
        kept = (columns < lengths.unsqueeze(1)).to(attention.dtype)
        return Tokens(self.tokens[rows].gather(1, source), kept, mask, starts, shortest_prompt)

    def columns_with_logits(self, plain_head: bool) -> int:
        """How many of the last columns a model makes logits of; with a plain head it makes them later, where needed."""
        if self.reply_starts is None:
            return self.width + 1
        return self.tokens.shape[1] if plain_head else self.tokens.shape[1] - self.shortest_prompt + 1

    def _reply_columns(self, first: int, count: int) -> Tensor:
        """Columns of response positions ``first`` .. ``first + count - 1`` of each row, within the row (B, count)."""
        assert self.reply_starts is not None
        offsets = torch.arange(first, first + count, device=self.tokens.device)
        return (self.reply_starts.unsqueeze(1) + offsets).clamp(max=self.tokens.shape[1] - 1)


def response_logits(model: PreTrainedModel, batch: Tokens) -> LazyLogits:
    """Logits at the positions before each response token and at the last one: (B, T + 1, V)."""
    keep = batch.columns_with_logits(has_plain_head(model))
    logits = lazy_logits(model, batch.tokens, batch.attention_mask, batch.position_ids, keep)
    return replace(logits, states=batch.before_and_at_replies(logits.states))


def logits_and_values(model: ActorCritic, batch: Tokens) -> tuple[LazyLogits, Tensor]:
    """:func:`response_logits` (B, T + 1, V) and :func:`response_values` (B, T), in one pass of the backbone."""
    keep = batch.columns_with_logits(has_plain_head(model.policy))
    logits, scores = model(batch.tokens, batch.attention_mask, batch.position_ids, logits_to_keep=keep)
    states = batch.before_and_at_replies(logits.states)
    return replace(logits, states=states), batch.before_and_at_replies(scores)[:, :-1]


def response_values(critic: TokenScorer, batch: Tokens) -> Tensor:
    """Value of the state *before* each response token: (B, T)."""
    scores = critic.token_scores(batch.tokens, batch.attention_mask, batch.position_ids, batch.reply_mask)
    return batch.before_and_at_replies(scores)[:, :-1]


def pad_columns(values: Tensor, width: int) -> Tensor:
    """Zeros appended to reach ``width`` columns: (b, t) -> (b, width)."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))

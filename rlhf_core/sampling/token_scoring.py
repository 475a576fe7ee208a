"""Passes over sampled replies.

They give logits and values, log-probabilities, entropy and exact KL.

The distribution is a row of the vocabulary's size for every position, the result a few numbers.
Where the rows of a batch would not fit into ``limit`` bytes, they are computed in chunks (see
:mod:`rlhf_core.models.forward`), and at the tokens of replies only, not at their padding. Within
the limit they are computed as a whole.

Shapes: B sequences, T response positions, V vocabulary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.data.batches import padding_share, passes
from rlhf_core.models.architecture import has_plain_head
from rlhf_core.models.forward import (
    LOGITS_BYTES,
    LazyLogits,
    compute_in_chunks,
    lazy_logits,
    position_ids_from_mask,
    right_padded,
)
from rlhf_core.models.heads import ActorCritic, ScalarModel
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling, log_distribution, log_distribution_at

MICRO_BATCH = 16


@dataclass(frozen=True)
class Tokens:
    """What a model needs to see of a batch.

    Attributes:
        tokens: (B, L). Prompts are padded on the left and replies on the right, L being P + T,
            unless there are ``reply_starts``.
        attention_mask: (B, L).
        response_mask: (B, T).
        reply_starts: Column of each reply's first token (B,), where rows begin in the first column.
            None otherwise.
        shortest_prompt: The least of ``reply_starts``, known without waiting for a GPU.
    """

    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    reply_starts: Tensor | None = None
    shortest_prompt: int = 1

    @property
    def width(self) -> int:
        return self.response_mask.shape[1]

    @property
    def response(self) -> Tensor:
        """Response token ids (B, T)."""
        if self.reply_starts is not None:
            columns = self._reply_columns(0, self.width)
            return self.tokens.gather(1, columns)
        first = self.tokens.shape[1] - self.width
        return self.tokens[:, first:]

    @property
    def mask_and_positions(self) -> tuple[Tensor | None, Tensor]:
        """The mask that attention sees, where it needs one, and positions.

        See ``models.forward.right_padded``.

        They are (B, L), and counted from the first real token, so that padding never changes a
        number.
        """
        if self.reply_starts is not None:
            return right_padded(self.attention_mask)
        return self.attention_mask, position_ids_from_mask(self.attention_mask)

    @property
    def reply_mask(self) -> Tensor:
        """1 at the response's tokens among all columns (B, L)."""
        if self.reply_starts is not None:
            columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
            is_reply = columns >= self.reply_starts.unsqueeze(1)
            return self.attention_mask.long() * is_reply
        prompt = self.tokens.shape[1] - self.width
        mask = self.response_mask.long()
        return torch.nn.functional.pad(mask, (prompt, 0))

    def replies(self) -> list[list[int]]:
        """Token ids of each reply, its end marker included."""
        rows = self.response.tolist()
        lengths = self.response_mask.sum(dim=1).tolist()
        replies = []
        for row, length in zip(rows, lengths, strict=True):
            replies.append(row[:length])
        return replies

    @property
    def real_positions(self) -> Tensor:
        """Numbers of the response's tokens among the B * T response positions, row by row (N,)."""
        return self.response_mask.flatten().nonzero().squeeze(1)

    def lengths(self) -> tuple[list[int], list[int]]:
        """Real tokens of each prompt and of each response."""
        replies = self.response_mask.sum(dim=1)
        prompts = self.attention_mask.sum(dim=1) - replies
        both = torch.stack((prompts, replies))
        prompt_lengths, reply_lengths = both.tolist()  # one copy to the host
        return prompt_lengths, reply_lengths

    def before_and_at_replies(self, values: Tensor) -> Tensor:
        """What is before each response token, and at the last position.

        Shapes: (B, L, ...) -> (B, T + 1, ...).

        Columns before all of these may be left out of ``values``.
        """
        width = values.shape[1]
        if self.reply_starts is None:
            first = width - self.width - 1
            return values[:, first:]
        left_out = self.tokens.shape[1] - width
        columns = self._reply_columns(-1, self.width + 1)
        columns = columns - left_out
        rows = torch.arange(len(values), device=values.device)
        return values[rows.unsqueeze(1), columns]

    def part(self, rows: Tensor) -> Tokens:
        """The given rows, with the padding that they do not need cut off on both sides."""
        own = self.rows(rows)
        prompts, replies = own.lengths()
        longest_prompt = max(1, *prompts)
        longest_reply = max(1, *replies)
        return own.cut(longest_prompt, longest_reply)

    def rows(self, rows: Tensor | slice) -> Tokens:
        """The given rows, as wide as all of them are."""
        tokens = self.tokens[rows]
        attention = self.attention_mask[rows]
        return Tokens(tokens, attention, self.response_mask[rows])

    def cut(self, prompt: int, reply: int) -> Tokens:
        """All rows, cut to ``prompt`` columns of prompts and ``reply`` columns of replies."""
        end = self.tokens.shape[1] - self.width
        span = slice(end - prompt, end + reply)
        tokens = self.tokens[:, span]
        attention = self.attention_mask[:, span]
        return Tokens(tokens, attention, self.response_mask[:, :reply])

    def compact(self, width: int, reply: int, shortest_prompt: int) -> Tokens:
        """All rows, each beginning in the first of ``width`` columns.

        They have ``reply`` response positions.

        No prompt is shorter than ``shortest_prompt``, which is at least one token.
        """
        mask = self.response_mask[:, :reply]
        lengths = self.attention_mask.sum(dim=1)
        starts = lengths - mask.sum(dim=1)
        columns = torch.arange(width, device=lengths.device)
        old_width = self.tokens.shape[1]
        first = old_width - self.width - starts
        source = first.unsqueeze(1) + columns
        source = source.clamp(max=old_width - 1)
        tokens = self.tokens.gather(1, source)
        is_kept = columns < lengths.unsqueeze(1)
        attention = is_kept.to(self.attention_mask.dtype)
        return Tokens(tokens, attention, mask, starts, shortest_prompt)

    def columns_with_logits(self, plain_head: bool) -> int:
        """How many of the last columns a model makes logits of.

        With a plain head it makes them later, where needed.
        """
        if self.reply_starts is None:
            return self.width + 1
        columns = self.tokens.shape[1]
        if plain_head:
            return columns
        return columns - self.shortest_prompt + 1

    def _reply_columns(self, first: int, count: int) -> Tensor:
        """Columns of ``count`` response positions from ``first`` on, within each row (B, count)."""
        assert self.reply_starts is not None
        offsets = torch.arange(first, first + count, device=self.tokens.device)
        columns = self.reply_starts.unsqueeze(1) + offsets
        last = self.tokens.shape[1] - 1
        return columns.clamp(max=last)


def response_logits(model: PreTrainedModel, batch: Tokens) -> LazyLogits:
    """Logits at the positions before each response token and at the last one: (B, T + 1, V)."""
    keep = batch.columns_with_logits(has_plain_head(model))
    logits = lazy_logits(model, batch.tokens, *batch.mask_and_positions, keep)
    return replace(logits, states=batch.before_and_at_replies(logits.states))


def logits_and_values(model: ActorCritic, batch: Tokens) -> tuple[LazyLogits, Tensor]:
    """Compute :func:`response_logits` and :func:`response_values` in one pass of the backbone."""
    keep = batch.columns_with_logits(has_plain_head(model.policy))
    logits, scores = model(batch.tokens, *batch.mask_and_positions, logits_to_keep=keep)
    states = batch.before_and_at_replies(logits.states)
    values = batch.before_and_at_replies(scores)
    return replace(logits, states=states), values[:, :-1]


def response_values(critic: ScalarModel, batch: Tokens) -> Tensor:
    """Value of the state *before* each response token: (B, T)."""
    mask, positions = batch.mask_and_positions
    scores = critic.token_scores(batch.tokens, mask, positions, batch.reply_mask)
    values = batch.before_and_at_replies(scores)
    return values[:, :-1]


def pad_columns(values: Tensor, width: int) -> Tensor:
    """Zeros appended to reach ``width`` columns: (b, t) -> (b, width)."""
    missing = width - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing))


def token_statistics(
    logits: LazyLogits,
    batch: Tokens,
    sampling: Sampling,
    limit: int = LOGITS_BYTES,
    *,
    entropies: bool = False,
    reference: LazyLogits | None = None,
    exact_kl: bool = True,
) -> dict[str, Tensor]:
    """What a training distribution says of the response tokens, each (B, T).

    Masked positions may hold anything.

    Args:
        logits: Of the response positions, as :func:`response_logits` gives them.
        sampling: The training distribution.
        limit: Bytes of float32 logits that may exist at once, per model.
        entropies: Whether to compute ``entropy``, that of each distribution in nats.
        reference: Logits of a second model at the same positions.
        exact_kl: Whether to compute ``full_kl``, the exact KL to the reference over the vocabulary
            in nats.

    Returns:
        ``logprobs`` of the tokens, ``ref_logprobs`` under the reference where there is one, and
        what was asked for.
    """
    count = logits.chunks(limit, reference)
    if count == 1:
        # Without a name, so that they are freed: the logits are the largest tensors of all.
        policy = log_distribution(logits.whole()[:, :-1], sampling)
        other = None
        if reference is logits:
            other = policy
        elif reference is not None:
            with torch.no_grad():
                other = log_distribution(reference.whole()[:, :-1], sampling)
        return _statistics(policy, batch.response, entropies, other, exact_kl)
    real = batch.real_positions
    head = logits.repeatable_head()
    states = _at_tokens(logits, real)
    ref_states = states
    ref_head = head
    if reference is not None and reference is not logits:
        ref_states = _at_tokens(reference, real)
        if reference.head is not logits.head:
            ref_head = reference.repeatable_head()
    names: list[str] = []

    def compute(
        tokens: Tensor, positions: Tensor, states: Tensor, ref_states: Tensor
    ) -> tuple[Tensor, ...]:
        policy = log_distribution_at(head(states), positions, sampling)
        other = None
        if reference is logits:
            other = policy
        elif reference is not None:
            with torch.no_grad():
                other = log_distribution_at(ref_head(ref_states), positions, sampling)
        statistics = _statistics(policy, tokens, entropies, other, exact_kl)
        names[:] = statistics
        return tuple(statistics.values())

    tokens = batch.response.flatten()[real]
    positions = real % batch.width
    columns = compute_in_chunks(compute, (tokens, positions, states, ref_states), count)
    shape = batch.response_mask.shape
    found = {}
    for name, column in zip(names, columns, strict=True):
        everywhere = column.new_zeros(shape.numel())
        everywhere = everywhere.index_copy(0, real, column)
        found[name] = everywhere.view(shape)
    return found


def _at_tokens(logits: LazyLogits, real: Tensor) -> Tensor:
    """States (N, ...) before the response tokens at ``real`` (N,) of all positions."""
    before_tokens = logits.states[:, :-1]
    return before_tokens.flatten(0, 1)[real]


def _statistics(
    policy: Tensor, tokens: Tensor, entropies: bool, reference: Tensor | None, exact_kl: bool
) -> dict[str, Tensor]:
    """The statistics of tokens (...) from one or two log-distributions (..., V)."""
    statistics = {"logprobs": gather_logprobs(policy, tokens)}
    if reference is not None:
        statistics["ref_logprobs"] = gather_logprobs(reference, tokens)
        if exact_kl:
            statistics["full_kl"] = full_kl(policy, reference)
    if entropies:
        statistics["entropy"] = entropy(policy)
    return statistics


def gather_logprobs(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token: (..., V), (...) -> (...)."""
    indices = tokens.unsqueeze(-1)
    return log_probabilities.gather(-1, indices).squeeze(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy of each next-token distribution in nats: log-distributions (..., V) -> (...)."""
    terms = log_probabilities.exp() * log_probabilities
    return -terms.sum(dim=-1)


def full_kl(log_probabilities: Tensor, ref_log_probabilities: Tensor) -> Tensor:
    """Exact KL over the vocabulary at every position: two log-distributions (..., V) -> (...)."""
    log_ratios = log_probabilities - ref_log_probabilities
    terms = log_probabilities.exp() * log_ratios
    return terms.sum(dim=-1)


Pass = tuple[list[int], float]  # row numbers, and the weight of their terms
MOST_PADDING = 0.1  # of a micro-batch that is filled up to a budget of tokens


@dataclass(frozen=True)
class MicroBatch:
    """One pass.

    Attributes:
        rows: Row numbers (b,).
        tokens: What models see of them, without padding that the pass does not need.
        weight: Weight of its terms: 0 for a pass that is made only because other ranks make one,
            else 1.
    """

    rows: Tensor
    tokens: Tokens
    weight: float


@dataclass(frozen=True)
class MicroBatchLimits:
    """Bounds of one pass; they change no sum over a batch.

    With a bound on rows alone, prompts are padded on the left and replies on the right, to the
    longest of the part. With a budget of tokens as well, rows begin in the first column, so that a
    part is as wide as its longest row.

    Attributes:
        rows: Sequences; None for 16, or for no bound where there is a budget.
        tokens: Positions, padding included; a longer sequence makes a pass of its own. None for no
            budget.
    """

    rows: int | None = None
    tokens: int | None = None

    def split(self, batch: Tokens) -> Iterator[MicroBatch]:
        """This rank's micro-batches of ``batch``, rows of similar length together.

        All ranks make the same number of passes, because they gather sharded parameters together.
        """
        prompts, replies = batch.lengths()
        shards = self._shards(prompts, replies)[distributed.rank()]
        # One copy to the device for all of them: the host waits for each.
        numbers: list[int] = []
        sizes = []
        for rows, _ in shards:
            numbers += rows
            sizes.append(len(rows))
        together = torch.tensor(numbers, dtype=torch.long).to(batch.tokens.device)
        indices = together.split(sizes)
        for (rows, weight), index in zip(shards, indices, strict=True):
            own_prompts = [prompts[row] for row in rows]
            own_replies = [replies[row] for row in rows]
            reply = max(1, *own_replies)
            own = batch.rows(index)
            if self.tokens is None:
                prompt = max(1, *own_prompts)
                tokens = own.cut(prompt, reply)
            else:
                shortest = min(own_prompts)
                assert shortest > 0, "a prompt without tokens has nothing to predict its reply from"
                width = self._width(own_prompts, own_replies)
                tokens = own.compact(width, reply, shortest)
            yield MicroBatch(index, tokens, weight)

    def most_rows(self, width: int) -> int:
        """Sequences of ``width`` tokens that one pass takes, where there are enough of them."""
        if self.tokens is None:
            return self.rows or MICRO_BATCH
        filled = max(self.tokens // width, 1)
        return min(filled, self.rows or filled)

    def padding_share(self, batch: Tokens) -> float:
        """The share of padding in all positions of all ranks' micro-batches."""
        prompts, replies = batch.lengths()
        positions = 0
        for shard in self._shards(prompts, replies):
            for rows, _ in shard:
                own_prompts = [prompts[row] for row in rows]
                own_replies = [replies[row] for row in rows]
                positions += len(rows) * self._width(own_prompts, own_replies)
        useful = sum(prompts) + sum(replies)
        return padding_share(useful, positions)

    def _shards(self, prompts: list[int], replies: list[int]) -> list[list[Pass]]:
        """The rows and the weights of each rank's passes; lengths of all rows are known to all."""
        lengths = list(map(operator.add, prompts, replies))
        ranks = distributed.world_size()
        shards: list[list[Pass]] = []
        if self.tokens is None:
            rows = range(len(lengths))
            order = sorted(rows, key=lengths.__getitem__)
            size = self.rows or MICRO_BATCH
            for rank in range(ranks):
                shards.append(list(passes(order, size, rank)))
            return shards
        parts = filled_parts(lengths, self.tokens, self.rows)
        divide_for_ranks(parts, ranks)
        most = math.ceil(len(parts) / ranks)
        for rank in range(ranks):
            own_parts = parts[rank::ranks]
            shard = [(part, 1.0) for part in own_parts]
            if len(shard) < most:
                shard.append((parts[0], 0.0))
            shards.append(shard)
        return shards

    def _width(self, prompts: list[int], replies: list[int]) -> int:
        if self.tokens is None:
            return max(*prompts, 1) + max(*replies, 1)
        widths = []
        for prompt, reply in zip(prompts, replies, strict=True):
            widths.append(prompt + max(reply, 1))
        return max(widths)


def filled_parts(lengths: Sequence[int], budget: int, most_rows: int | None) -> list[list[int]]:
    """Rows in parts of at most ``budget`` positions, the longest first.

    A part is as wide as its longest row. It ends, too, where a further row would make more than a
    tenth of it padding.

    Args:
        lengths: Tokens of each row.
        budget: Positions of a part, padding included. A row that is longer makes a part of its own.
        most_rows: The largest number of rows of a part; None for no bound.
    """
    most_rows = most_rows or len(lengths)
    rows = range(len(lengths))
    longest_first = sorted(rows, key=lambda row: -lengths[row])
    parts: list[list[int]] = []
    part: list[int] = []
    useful = longest = 0
    for row in longest_first:
        length = lengths[row]
        if part:
            positions = longest * (len(part) + 1)
            fits = positions <= budget and len(part) < most_rows
            if fits and padding_share(useful + length, positions) <= MOST_PADDING:
                part.append(row)
                useful += length
                continue
        part = [row]
        useful = longest = length
        parts.append(part)
    return parts


def divide_for_ranks(parts: list[list[int]], ranks: int) -> None:
    """Halve the parts with the most rows, in place, until all ranks have as many.

    Parts of one row are not divided.
    """
    while len(parts) % ranks and max(map(len, parts)) > 1:
        part = max(parts, key=len)
        number = parts.index(part)
        half = len(part) // 2
        halves = [part[:half], part[half:]]
        parts[number : number + 1] = halves

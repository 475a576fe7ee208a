"""Parts of a batch of replies that a rank computes in one pass, and how much of them is padding.

With a bound on rows alone, prompts are padded on the left and replies on the right, to the longest of the part. With a
budget of tokens as well, rows begin in the first column, so that a part is as wide as its longest row.

Shapes: B sequences, P prompt width (left-padded), T response width (right-padded).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.data.batches import padding_share, passes
from rlhf_core.runtime import distributed
from rlhf_core.sampling.token_scoring import MICRO_BATCH, Tokens

MOST_PADDING = 0.1  # of a micro-batch that is filled up to a budget of tokens


@dataclass(frozen=True)
class MicroBatch:
    """One pass.

    Attributes:
        rows: Row numbers (b,).
        tokens: What models see of them, without padding that the pass does not need.
        weight: Weight of its terms: 0 for a pass that is made only because other ranks make one, else 1.
    """

    rows: Tensor
    tokens: Tokens
    weight: float


@dataclass(frozen=True)
class MicroBatchLimits:
    """Bounds of one pass; they change no sum over a batch.

    Attributes:
        rows: Sequences; None for 16, or for no bound where there is a budget.
        tokens: Positions, padding included; a longer sequence makes a pass of its own. None for no budget.
    """

    rows: int | None = None
    tokens: int | None = None

    def split(self, batch: Tokens) -> Iterator[MicroBatch]:
        """This rank's micro-batches of ``batch``, rows of similar length together.

        All ranks make the same number of passes, because they gather sharded parameters together.
        """
        prompts, replies = batch.lengths()
        shards = list(self._shards(prompts, replies))
        # One copy to the device for all of them: the host waits for each.
        together = torch.tensor([row for rows, _ in shards for row in rows], dtype=torch.long).to(batch.tokens.device)
        for (rows, weight), index in zip(shards, together.split([len(rows) for rows, _ in shards]), strict=True):
            own_prompts, own_replies = [prompts[row] for row in rows], [replies[row] for row in rows]
            reply = max(1, *own_replies)
            if self.tokens is None:
                tokens = batch.cut(index, max(1, *own_prompts), reply)
            else:
                assert min(own_prompts) > 0, "a prompt without tokens has nothing to predict its reply from"
                tokens = batch.compact(index, self._width(own_prompts, own_replies), reply, min(own_prompts))
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
        widths = [
            len(rows) * self._width([prompts[row] for row in rows], [replies[row] for row in rows])
            for rows, _ in self._shards(prompts, replies)
        ]
        computed = distributed.reduce_metrics({"positions": float(sum(widths))})["positions"]
        return padding_share(sum(prompts) + sum(replies), int(computed))

    def _shards(self, prompts: list[int], replies: list[int]) -> Iterator[tuple[list[int], float]]:
        lengths = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
        if self.tokens is None:
            order = sorted(range(len(lengths)), key=lengths.__getitem__)
            yield from passes(order, self.rows or MICRO_BATCH)
            return
        parts = filled_parts(lengths, self.tokens, self.rows)
        ranks = distributed.world_size()
        divide_for_ranks(parts, ranks)
        for start in range(0, len(parts), ranks):
            own = start + distributed.rank()
            yield (parts[own], 1.0) if own < len(parts) else (parts[0], 0.0)

    def _width(self, prompts: list[int], replies: list[int]) -> int:
        if self.tokens is None:
            return max(*prompts, 1) + max(*replies, 1)
        return max(prompt + max(reply, 1) for prompt, reply in zip(prompts, replies, strict=True))


def filled_parts(lengths: Sequence[int], budget: int, most_rows: int | None = None) -> list[list[int]]:
    """Rows in parts of at most ``budget`` positions, the longest first.

    A part is as wide as its longest row. It ends, too, where a further row would make more than a tenth of it padding.

    Args:
        lengths: Tokens of each row.
        budget: Positions of a part, padding included. A row that is longer makes a part of its own.
        most_rows: The largest number of rows of a part; None for no bound.
    """
    parts: list[list[int]] = []
    useful = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        part = parts[-1] if parts else []
        positions = lengths[part[0]] * (len(part) + 1) if part else math.inf
        fits = positions <= budget and len(part) < (most_rows or math.inf)
        if fits and padding_share(useful + lengths[row], int(positions)) <= MOST_PADDING:
            part.append(row)
            useful += lengths[row]
        else:
            parts.append([row])
            useful = lengths[row]
    return parts


def divide_for_ranks(parts: list[list[int]], ranks: int) -> None:
    """Halve parts with the most rows, in place, until there are as many for each rank, as far as rows allow."""
    while len(parts) % ranks and max(map(len, parts)) > 1:
        number = max(range(len(parts)), key=lambda part: len(parts[part]))
        part = parts[number]
        parts[number : number + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]

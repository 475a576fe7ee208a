"""Next-token logits that are computed from hidden states a part at a time, when they are needed.

With a vocabulary of 152,000 the float32 logits of 4,096 positions take 2.5 GB, and their softmax and its gradient as
much again. What losses and metrics need of them is a few numbers per position, so it is computed in chunks of positions
whose logits are dropped at once and recomputed in the backward pass (Wijmans et al. 2024, "Cut Your Losses in
Large-Vocabulary Language Models", avoids them in the same way within one kernel).

Shapes: N positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_core.config.operations import DEFAULT_LOGITS_MIB, MIB
from rlhf_core.models.float32_head import Float32Linear
from rlhf_core.runtime import distributed

LOGITS_BYTES = DEFAULT_LOGITS_MIB * MIB  # float32 logits that exist at once where nothing else is asked for
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LazyLogits:
    """Logits (..., V) that are computed on demand.

    Attributes:
        states: Hidden states (..., H). Of a model that does more to its logits than unembed they are the logits.
        head: Makes logits (..., V) of hidden states.
        vocabulary: V.
    """

    states: Tensor
    head: Head
    vocabulary: int

    def whole(self) -> Tensor:
        """All logits at once (..., V)."""
        return self.head(self.states)

    def chunks(self, limit: int) -> int:
        """Parts of at most ``limit`` bytes of float32 logits that the positions make."""
        return chunk_count(math.prod(self.states.shape[:-1]), self.vocabulary, limit)

    def repeatable_head(self) -> Head:
        """The head for many calls: what does not change between them is made once."""
        return self.head.repeatable() if isinstance(self.head, Float32Linear) else self.head


def chunk_count(positions: int, vocabulary: int, limit: int) -> int:
    """Parts of at most ``limit`` bytes that the float32 logits of ``positions`` make, one position at the least.

    It is the largest number that any rank needs: where the head is sharded, all ranks gather it together.
    """
    count = min(math.ceil(4 * positions * vocabulary / limit), positions)
    return distributed.largest_of_ranks(max(count, 1))


def compute_in_chunks(
    compute: Callable[..., tuple[Tensor, ...]], columns: Sequence[Tensor], count: int
) -> tuple[Tensor, ...]:
    """Run ``compute`` on ``count`` parts of the columns' rows, and join its results.

    Args:
        compute: (n, ...) of each column -> tensors of n rows. What it holds in between is not kept for the backward
            pass, in which it runs again.
        columns: Tensors of N rows.
        count: Number of parts; they differ by one row at most, and are empty where there are more parts than rows.
    """
    if torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    parts = zip(*(column.tensor_split(count) for column in columns), strict=True)
    results = [compute(*part) for part in parts]
    return tuple(torch.cat(column) for column in zip(*results, strict=True))

"""Several reward sources as one reward function: the weighted sum of their rewards, and metrics about each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.ppo.reward_sources.source import PromptReader, Replies, Source
from rlhf_core.sampling.token_scoring import Tokens


@dataclass(frozen=True)
class WeightedSource:
    """A source with its name in metrics and its weight in the sum."""

    name: str
    weight: float
    source: Source


class RewardMixture:
    """``reward = sum of weight * source reward``: a :data:`~rlhf_core.ppo.rewards.token_rewards.RewardFn`.

    ``metrics`` are about the newest batch: ``source_NAME_mean`` and ``source_NAME_std`` of the unweighted rewards (B,)
    where there is more than one source (population std), and a source's own metrics as ``source_NAME_...``.
    """

    def __init__(
        self, sources: Sequence[WeightedSource], reader: PromptReader, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.sources, self.reader, self.tokenizer = tuple(sources), reader, tokenizer
        self.metrics: dict[str, float] = {}

    def __call__(self, batch: Tokens) -> Tensor:
        """Raw reward of every reply (B,)."""
        replies = Replies(batch, self.reader, self.tokenizer)
        columns = [weighted.source.rewards(replies) for weighted in self.sources]
        self.metrics = self._metrics(columns)
        return reduce(torch.add, [w.weight * column for w, column in zip(self.sources, columns, strict=True)])

    def _metrics(self, columns: Sequence[Tensor]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for weighted, column in zip(self.sources, columns, strict=True):
            prefix = f"source_{weighted.name}"
            if len(self.sources) > 1:
                metrics[f"{prefix}_mean"] = float(column.mean())
                metrics[f"{prefix}_std"] = float(column.std(unbiased=False))
            metrics |= {f"{prefix}_{name}": value for name, value in weighted.source.metrics.items()}
        return metrics

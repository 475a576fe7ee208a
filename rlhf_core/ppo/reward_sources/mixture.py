"""Several reward sources as one scorer: the weighted sum of their scores, and figures about each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.ppo.reward_sources.source import PromptReader, Replies, Source
from rlhf_core.ppo.rollout import Scorer
from rlhf_core.sampling.token_scoring import Tokens


@dataclass(frozen=True)
class Part:
    """A source with its name in metrics and its weight in the sum."""

    name: str
    weight: float
    source: Source


class Mixture:
    """``score = sum of weight * source score``: a :class:`~rlhf_core.ppo.rollout.Scorer`.

    ``figures`` are about the newest batch: ``source_NAME_mean`` and ``source_NAME_std`` of the unweighted scores (B,)
    where there is more than one source (population std), and what a source itself tells, as ``source_NAME_...``.
    """

    def __init__(self, parts: Sequence[Part], reader: PromptReader, tokenizer: PreTrainedTokenizerBase) -> None:
        self.parts, self.reader, self.tokenizer = tuple(parts), reader, tokenizer
        self.figures: dict[str, float] = {}

    def __call__(self, batch: Tokens) -> Tensor:
        """Raw score of every reply (B,)."""
        replies = Replies(batch, self.reader, self.tokenizer)
        scores = [part.source.score(replies) for part in self.parts]
        self.figures = self._figures(scores)
        return reduce(torch.add, [part.weight * column for part, column in zip(self.parts, scores, strict=True)])

    def _figures(self, scores: Sequence[Tensor]) -> dict[str, float]:
        found: dict[str, float] = {}
        for part, column in zip(self.parts, scores, strict=True):
            if len(self.parts) > 1:
                found[f"source_{part.name}_mean"] = float(column.mean())
                found[f"source_{part.name}_std"] = float(column.std(unbiased=False))
            found |= {f"source_{part.name}_{name}": value for name, value in part.source.figures.items()}
        return found


def source_figures(scorer: Scorer) -> dict[str, float]:
    """Figures about the newest batch that ``scorer`` scored; none for a scorer that is not a mixture."""
    return dict(scorer.figures) if isinstance(scorer, Mixture) else {}

"""A source that knows nothing of ranks, used by several: each scores its share of the replies."""

from __future__ import annotations

from torch import Tensor

from rlhf_core import distributed
from rlhf_core.data.sharding import passes
from rlhf_core.ppo.reward_sources.source import Replies, Source


class Shared:
    """``source`` scores this rank's replies, and every rank gets all scores: a text is scored once, however many ranks
    there are, and a scorer that is not deterministic still tells all of them the same.

    ``figures`` are means over the replies of all ranks.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.figures: dict[str, float] = {}

    def score(self, replies: Replies) -> Tensor:
        """One raw score per reply (B,)."""
        if distributed.world_size() == 1:
            scores = self.source.score(replies)
            self.figures = self.source.figures
            return scores
        total = len(replies)
        ((rows, counts),) = passes(list(range(total)), total)
        held = int(counts) * len(rows)
        scores = self.source.score(replies.part(rows))[:held]
        sums = distributed.reduce_metrics({name: held * value for name, value in self.source.figures.items()})
        self.figures = {name: value / total for name, value in sums.items()}
        return distributed.gather_rows(scores, total)

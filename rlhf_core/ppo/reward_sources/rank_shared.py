"""A reward source that knows nothing of ranks, used by several: each has its share of the replies rewarded."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.data.batches.sharding import passes
from rlhf_core.ppo.reward_sources.source import Replies, Source
from rlhf_core.runtime import distributed


class RankShared:
    """Asks ``source`` for this rank's replies, and gives every rank all rewards.

    A text is rewarded once, however many ranks there are, and a source that is not deterministic still gives all of
    them the same. ``metrics`` are means over the replies of all ranks.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.metrics: dict[str, float] = {}

    def rewards(self, replies: Replies) -> Tensor:
        """One raw reward per reply (B,)."""
        if distributed.world_size() == 1:
            rewards = self.source.rewards(replies)
            self.metrics = self.source.metrics
            return rewards
        total = len(replies)
        ((rows, weight),) = passes(list(range(total)), total)
        own = int(weight) * len(rows)
        rewards = self.source.rewards(replies.part(rows))[:own]
        sums = distributed.reduce_metrics({name: own * value for name, value in self.source.metrics.items()})
        self.metrics = {name: value / total for name, value in sums.items()}
        return distributed.gather_rows(rewards, total)

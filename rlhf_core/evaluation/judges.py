"""The gold judge: the true preference of the embedded world, for evaluation only.

Nothing that trains, selects or watches may import this module; learned judges live in ``model_judge.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.data.schema import Message
from rlhf_core.evaluation.text_metrics import Reply
from rlhf_core.world import gold

# The gold judge's smallest step is one word too many, .02 / 1.4 = .014: anything below it is rounding.
GOLD_TIE_MARGIN = 0.01


class GoldJudge:
    """The true preference of the embedded world. Only evaluation may use it: training and selection never do."""

    name = "gold"
    absolute_tie: float | None = GOLD_TIE_MARGIN

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Gold scores in [-1.8, 1]; ``DataError`` for a prompt outside the world."""
        pairs = zip(prompts, replies, strict=True)
        return [gold.score(prompt[-1].content, reply.text, reply.finished) for prompt, reply in pairs]

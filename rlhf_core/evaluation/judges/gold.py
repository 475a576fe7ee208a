"""The gold judge, the true preference of the synthetic world, and judges by name.

Nothing that trains, selects checkpoints or monitors health may import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.data.schema import Message
from rlhf_core.evaluation.judges.model import Judge, ModelJudge
from rlhf_core.evaluation.replies import Reply
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.world import gold

# The smallest step of a gold score is one word too many, .02 / 1.4 = .014: a difference below it is
# rounding.
GOLD_TIE_MARGIN = 0.01


class GoldJudge:
    """Scores replies by the true preference of the synthetic world."""

    name = "gold"
    absolute_tie: float | None = GOLD_TIE_MARGIN

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Return gold scores in [-1.8, 1].

        Raises:
            DataError: A prompt is not one of the synthetic world.
        """
        pairs = zip(prompts, replies, strict=True)
        return [
            gold.score(prompt[-1].content, reply.text, reply.finished) for prompt, reply in pairs
        ]

    def right(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[bool]:
        """Return which replies give what was asked for: the true fact, all steps, a refusal."""
        pairs = zip(prompts, replies, strict=True)
        return [gold.is_right(prompt[-1].content, reply.text) for prompt, reply in pairs]


@contextmanager
def borrowed_judge(
    name: str, folders: Mapping[str, Path], batch_size: int, frozen: FrozenModels
) -> Iterator[Judge]:
    """Yield the gold judge, or the model in ``folders[name]``, for the block alone.

    ``frozen`` says where the model is placed.
    """
    if name == "gold":
        yield GoldJudge()
        return
    judge = ModelJudge.load(folders[name], name, batch_size, frozen.loading)
    with frozen.borrowed(judge.model) as judge.model:
        yield judge
    del judge.model  # whoever still has the judge; a large one needs the memory of the one before

"""The interface of every judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlhf_core.data.schema import Message
from rlhf_core.evaluation.replies.reply import Reply


class Judge(Protocol):
    """Scores replies; higher is better.

    Attributes:
        name: Prefix of the judge's scores in metrics and samples.
        absolute_tie: Largest difference that is still a tie, in the judge's own unit; None for judges whose unit means
            nothing (their margin is relative to the spread of scores).
    """

    name: str
    absolute_tie: float | None

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Score ``replies[i]`` as the answer to ``prompts[i]``; one score per reply."""
        ...

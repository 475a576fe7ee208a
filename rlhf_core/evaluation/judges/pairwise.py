"""The interface of judges that compare two replies and give no scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_core.data.schema import Message
from rlhf_core.evaluation.replies.reply import Reply

WIN, TIE, LOSS = 1.0, 0.5, 0.0


@dataclass(frozen=True)
class PairwiseJudgement:
    """What a judge says about one pair.

    Attributes:
        outcome: 1 if the candidate's reply is better, ½ for a tie, 0 if the baseline's is; None if the judge gave no
            usable answer.
        reason: The judge's own words.
    """

    outcome: float | None
    reason: str = ""


@dataclass(frozen=True)
class PairwiseJudgements:
    """A judge's answers on all pairs, in their order.

    Attributes:
        pairs: One judgement per pair.
        metrics: How the judge worked, such as the share of pairs without a usable answer.
    """

    pairs: Sequence[PairwiseJudgement]
    metrics: Mapping[str, float]

    @property
    def judged(self) -> list[int]:
        """The positions of the pairs that have an outcome."""
        return [i for i, pair in enumerate(self.pairs) if pair.outcome is not None]

    def outcomes(self) -> list[float]:
        """The outcomes of the pairs that have one, in their order."""
        return [pair.outcome for pair in self.pairs if pair.outcome is not None]


class PairwiseJudge(Protocol):
    """Decides which of two replies to a prompt is better.

    Attributes:
        name: The judge's name in metrics and samples.
    """

    name: str

    def judge(
        self, prompts: Sequence[Sequence[Message]], candidate: Sequence[Reply], baseline: Sequence[Reply]
    ) -> PairwiseJudgements:
        """Compare ``candidate[i]`` with ``baseline[i]`` as the answer to ``prompts[i]``."""
        ...

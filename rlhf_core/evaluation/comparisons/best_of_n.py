"""Best of n: of n replies of SFT to each prompt, the one that the reward model scores highest.

It spends at every reply what PPO spends once, with the same reward model, so that it is what PPO has to be better than.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.comparisons.comparison import Comparison
from rlhf_core.evaluation.judges.judge import Judge
from rlhf_core.evaluation.metrics.text_metrics import measure_text
from rlhf_core.evaluation.replies.reply import Reply


def kl_bound(n: int) -> float:
    """``log n - (n - 1) / n``: an upper bound on the KL of best of n to SFT, in nats per reply.

    It is the KL where no two replies are alike or score alike; where some do, the true one is smaller (Beirami et al.
    2024, "Theoretical guarantees on the best-of-n alignment policy").
    """
    return math.log(n) - (n - 1) / n


@dataclass(frozen=True)
class BestOfN:
    """The chosen replies under evaluation.

    Attributes:
        n: Replies sampled to each prompt.
        replies: The best one of each prompt.
        sampled_tokens: Tokens of all replies that were sampled, the chosen ones included.
        scores: Scores of ``replies`` by judge.
    """

    n: int
    replies: list[Reply]
    sampled_tokens: int
    scores: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def chosen_by(cls, judge: Judge, prompts: Sequence[Prompt], samples: Sequence[Sequence[Reply]]) -> BestOfN:
        """Choose among ``samples``, n lists of one reply per prompt; of equal scores the first wins."""
        asked = [row.prompt for row in prompts]
        scores = np.array([judge.score(asked, replies) for replies in samples])
        best = scores.argmax(axis=0)
        return cls(
            n=len(samples),
            replies=[samples[draw][row] for row, draw in enumerate(best)],
            sampled_tokens=sum(len(reply.token_ids) for replies in samples for reply in replies),
        )

    def scored_by(self, judge: Judge, prompts: Sequence[Prompt]) -> BestOfN:
        """Return the same replies with this judge's scores added."""
        scores = judge.score([row.prompt for row in prompts], self.replies)
        return replace(self, scores={**self.scores, judge.name: scores})

    def metrics(
        self, against_sft: Mapping[str, Comparison], policy_against: Mapping[str, Comparison]
    ) -> dict[str, Any]:
        """Return ``best_of_n`` of ``metrics/evaluation.json``; see docs/metrics.md.

        Args:
            against_sft: These replies against SFT's, by judge.
            policy_against: The policy's replies against these, by judge.
        """
        return {
            "n": self.n,
            "kl_bound": kl_bound(self.n),
            "sampled_tokens_per_reply": self.sampled_tokens / len(self.replies),
            **{judge: float(np.mean(scores)) for judge, scores in self.scores.items()},
            **measure_text(self.replies).as_dict(),
            "comparison": {judge: comparison.as_dict() for judge, comparison in against_sft.items()},
            "policy_comparison": {judge: comparison.as_dict() for judge, comparison in policy_against.items()},
        }

    def columns(self) -> list[dict[str, Any]]:
        """Return this side's columns of ``samples/comparisons.parquet``, for the first row of each prompt."""
        return [
            {
                "best_of_n_reply": reply.text,
                "best_of_n_finished": reply.finished,
                **{f"best_of_n_{judge}": scores[row] for judge, scores in self.scores.items()},
            }
            for row, reply in enumerate(self.replies)
        ]

"""The held-out pairs that a reward model gets most wrong (Zheng et al. 2023, "Secrets of RLHF", table 1).

Many of them are mislabelled or ambiguous; the rest show what the model does not see.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhf_core.training.reward.run import Split, reply_lengths
from rlhf_core.training.reward.trainer import PairScores

KEPT = 10


def worst_mistakes(scores: PairScores, split: Split, kept: int = KEPT) -> list[dict[str, Any]]:
    """Return the pairs with the most negative margins, worst first; fewer where fewer are ranked wrongly."""
    chosen_lengths, rejected_lengths = reply_lengths(split.pairs)
    order = np.argsort(scores.margins, kind="stable")[:kept]
    return [
        {
            "id": split.rows[i].id,
            "category": split.rows[i].category,
            "prompt": "\n".join(f"{message.role}: {message.content}" for message in split.rows[i].prompt),
            "chosen": split.rows[i].chosen,
            "rejected": split.rows[i].rejected,
            "margin": float(scores.margins[i]),
            "reward_chosen": float(scores.chosen[i]),
            "reward_rejected": float(scores.rejected[i]),
            "tokens_chosen": int(chosen_lengths[i]),
            "tokens_rejected": int(rejected_lengths[i]),
        }
        for i in order.tolist()
        if scores.margins[i] < 0
    ]

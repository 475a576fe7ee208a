"""How often a model refuses the harmful safety prompts, and how often it answers the benign ones."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.data.schema import Message, Prompt, content_id
from rlhf_core.evaluation.regression import REFUSAL_CHECKS, check_rates, fixed_subset
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.evaluation.safety.prompts import BENIGN, HARMFUL

SOURCE = "safety"
HARMFUL_CATEGORY, BENIGN_CATEGORY = "harmful", "benign"


def safety_prompts(per_category: int) -> list[Prompt]:
    """Choose up to ``per_category`` prompts of the categories ``harmful`` and ``benign`` each, by hash."""
    chosen = []
    for category, texts in ((HARMFUL_CATEGORY, HARMFUL), (BENIGN_CATEGORY, BENIGN)):
        rows = [
            Prompt(
                content_id("prompts", {"prompt": [{"role": "user", "content": text}]}),
                [Message("user", text)],
                category,
                SOURCE,
                text,
            )
            for text in texts
        ]
        chosen += fixed_subset(rows, per_category, SOURCE)
    return chosen


def refusal_rates(prompts: Sequence[Prompt], replies: Sequence[Reply]) -> dict[str, float]:
    """Return ``refuses_harmful`` and ``answers_benign``: the shares of replies to each category that do as they should.

    Every prompt has as many replies, which follow one another. Empty for no prompts.
    """
    if not prompts:
        return {}
    replies_per_prompt = len(replies) // len(prompts)
    categories = [row.category for row in prompts for _ in range(replies_per_prompt)]
    return check_rates(REFUSAL_CHECKS, categories, replies)

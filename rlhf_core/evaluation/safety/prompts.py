"""Harmful and benign prompts (``prompts.yaml``), and whether replies to them do as they should."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

from rlhf_core.data.schema import Message, Prompt, content_id
from rlhf_core.evaluation.regression import REFUSAL_CHECKS, check_rates, fixed_subset
from rlhf_core.evaluation.reply import Reply

SOURCE = "safety"
HARMFUL_CATEGORY, BENIGN_CATEGORY = "harmful", "benign"


@cache
def texts_of(category: str) -> tuple[str, ...]:
    """Return all prompts that are ``harmful`` or ``benign``, in the order of the file."""
    by_topic = YAML(typ="safe").load(Path(__file__).with_suffix(".yaml"))[category]
    return tuple(text for texts in by_topic.values() for text in texts)


def is_chinese(text: str) -> bool:
    """Return whether a prompt has a Chinese character."""
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def safety_prompts(per_category: int) -> list[Prompt]:
    """Choose up to ``per_category`` prompts of the categories ``harmful`` and ``benign`` each, by hash."""
    chosen = []
    for category in (HARMFUL_CATEGORY, BENIGN_CATEGORY):
        rows = [
            Prompt(
                content_id("prompts", {"prompt": [{"role": "user", "content": text}]}),
                [Message("user", text)],
                category,
                SOURCE,
                text,
            )
            for text in texts_of(category)
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

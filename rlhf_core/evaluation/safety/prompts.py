"""Harmful and benign prompts (``prompts.yaml``)."""

from __future__ import annotations

from functools import cache
from itertools import chain
from pathlib import Path

from ruamel.yaml import YAML

from rlhf_core.data.schema import Message, Prompt, content_id
from rlhf_core.evaluation.regression import fixed_subset

SOURCE = "safety"
HARMFUL_CATEGORY = "harmful"
BENIGN_CATEGORY = "benign"


@cache
def texts_of(category: str) -> tuple[str, ...]:
    """Return all prompts that are ``harmful`` or ``benign``, in the order of the file."""
    file = Path(__file__).with_suffix(".yaml")
    content = YAML(typ="safe").load(file)
    by_topic = content[category]
    return tuple(chain.from_iterable(by_topic.values()))


def is_chinese(text: str) -> bool:
    """Return whether a prompt has a Chinese character."""
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def safety_prompts(per_category: int) -> list[Prompt]:
    """Choose up to ``per_category`` harmful and as many benign prompts, by hash."""
    chosen = []
    for category in (HARMFUL_CATEGORY, BENIGN_CATEGORY):
        rows = []
        for text in texts_of(category):
            message = Message("user", text)
            row_id = content_id("prompts", {"prompt": [vars(message)]})
            rows.append(Prompt(row_id, [message], category, SOURCE, text))
        chosen += fixed_subset(rows, per_category, SOURCE)
    return chosen

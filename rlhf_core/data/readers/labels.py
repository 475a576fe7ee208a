"""Labels of single replies (KTO): whether a reply is one to imitate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from rlhf_core.data.readers.format import excerpt
from rlhf_core.data.readers.turns import Refusal

# TRL's name and LLaMA-Factory's.
COLUMNS = ("label", "kto_tag")
GOOD = frozenset({"true", "t", "yes", "y", "good", "desirable", "chosen", "accepted", "preferred"})
BAD = frozenset({"false", "f", "no", "n", "bad", "undesirable", "rejected"})
GOOD_NUMBERS = frozenset({1.0})
BAD_NUMBERS = frozenset({0.0, -1.0})


def is_labelled_false(labels: Mapping[str, Any]) -> bool:
    """Return whether a label says that the reply is a bad one; a reply without a label is not.

    Raises:
        Refusal: A label is none of the known words and numbers, so the reply might be a bad one.
    """
    verdicts = [_is_bad(labels[name], name) for name in COLUMNS if labels.get(name) not in (None, "")]
    return True in verdicts


def _is_bad(value: Any, name: str) -> bool:
    word = value.strip().casefold() if isinstance(value, str) else value
    if isinstance(word, str) and word in GOOD | BAD:
        return word in BAD
    try:
        number = float(word) if isinstance(word, str | int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if number not in GOOD_NUMBERS | BAD_NUMBERS:
        raise Refusal(
            f"{name} is {excerpt(value)}, which says neither that the reply is good nor that it is bad: write true or "
            "false, or leave the column out (columns)"
        )
    return number in BAD_NUMBERS

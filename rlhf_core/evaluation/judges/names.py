"""What the scalar models of a run are called, and which of them decide.

Nothing is loaded here, since commands start with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from rlhf_core.config.gates import CHECKER

TRAINED_ON = "reward"
SELECTED_BY = "referee"
JUDGE = "judge"
GOLD = "gold"
MODELS = Path("models")


def last_word(names: Collection[str]) -> str:
    """Return the judge of ``names`` that decides: the third model, else reward functions."""
    return JUDGE if JUDGE in names else CHECKER


# Of a judge that compares replies side by side: how often its verdict may change with their order,
# and how often it may prefer the one shown first. Beyond these it judges positions rather than
# replies.
MOST_ORDER_DISAGREEMENT = 0.3
FIRST_PREFERRED = (0.3, 0.7)


def position_bias(comparison: Mapping[str, float]) -> str:
    """Say how the order of replies sways a judge too much; empty where it does not."""
    changed = comparison.get("order_disagreement") or 0.0
    first = comparison.get("first_preferred")
    if changed > MOST_ORDER_DISAGREEMENT:
        most = f"{MOST_ORDER_DISAGREEMENT:.0%}"
        return f"{changed:.0%} of its verdicts change with the order of replies, and at most {most} may"
    if first is not None and not FIRST_PREFERRED[0] <= first <= FIRST_PREFERRED[1]:
        low, high = FIRST_PREFERRED
        return f"{first:.0%} of its verdicts are for the reply shown first, and {low:.0%} to {high:.0%} may be"
    return ""


def deciding_judges(comparison: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the final judges whose verdicts do not depend on the order of replies."""
    return [name for name in final_judges(comparison) if not position_bias(comparison[name])]


def final_judges(names: Iterable[str]) -> list[str]:
    """Return those of the judges ``names`` that decide, in alphabetical order."""
    return sorted(set(names) - {TRAINED_ON, SELECTED_BY})

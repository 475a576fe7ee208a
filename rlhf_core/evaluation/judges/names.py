"""What the scalar models of a run are called, and which of them decide. Nothing is loaded: commands start with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

TRAINED_ON = "reward"
SELECTED_BY = "referee"
JUDGE = "judge"
GOLD = "gold"
MODELS = Path("models")


# Of a judge that compares replies side by side: how often its verdict may change with their order, and how often it may
# prefer the one shown first. Beyond these it judges positions rather than replies.
MOST_ORDER_DISAGREEMENT = 0.3
FIRST_PREFERRED = (0.3, 0.7)


def position_bias(comparison: Mapping[str, float]) -> str:
    """Say why the comparison by one judge does not count, as far as that is the order of replies; empty if it does."""
    changed = comparison.get("order_disagreement") or 0.0
    first = comparison.get("first_preferred")
    if changed > MOST_ORDER_DISAGREEMENT:
        return f"its verdict changes with the order in {changed:.0%} of pairs, of at most {MOST_ORDER_DISAGREEMENT:.0%}"
    if first is not None and not FIRST_PREFERRED[0] <= first <= FIRST_PREFERRED[1]:
        low, high = FIRST_PREFERRED
        return f"it prefers the reply shown first in {first:.0%} of verdicts, outside {low:.0%} to {high:.0%}"
    return ""


def deciding_judges(comparison: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the final judges of a comparison whose verdicts do not depend on the order of replies."""
    return [name for name in final_judges(comparison) if not position_bias(comparison[name])]


def final_judges(names: Iterable[str]) -> list[str]:
    """Return those of the judges ``names`` that decide, in alphabetical order."""
    return sorted(set(names) - {TRAINED_ON, SELECTED_BY})

"""What the scalar models of a run are called, and which of them decide. Nothing is loaded: commands start with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from rlhf_core.config.gates import CHECKER

TRAINED_ON = "reward"
SELECTED_BY = "referee"
JUDGE = "judge"
GOLD = "gold"
MODELS = Path("models")


def last_word(names: Collection[str]) -> str:
    """Return which of the judges that any workspace has is among ``names``: the third model, or reward functions."""
    return JUDGE if JUDGE in names else CHECKER


def final_judges(names: Iterable[str]) -> list[str]:
    """Return those of the judges ``names`` that decide, in alphabetical order."""
    return sorted(set(names) - {TRAINED_ON, SELECTED_BY})

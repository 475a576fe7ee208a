"""What the scalar models of a run are called, and which of them decide. Nothing is loaded: commands start with it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

TRAINED_ON = "reward"
SELECTED_BY = "referee"
JUDGE = "judge"
GOLD = "gold"
MODELS = Path("models")


def final_judges(names: Iterable[str]) -> list[str]:
    """Return those of the judges ``names`` that decide, in alphabetical order."""
    return sorted(set(names) - {TRAINED_ON, SELECTED_BY})

"""Which judges have the last word on a policy: none that it was trained on, none that selected its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

TRAINED_ON = "reward"
SELECTED_BY = "referee"
JUDGE = "judge"
MODELS = Path("models")


def final_judges(names: Iterable[str]) -> list[str]:
    """Return those of the judges ``names`` that decide, in alphabetical order."""
    return sorted(set(names) - {TRAINED_ON, SELECTED_BY})

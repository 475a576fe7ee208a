"""Which judges have the last word on a policy: none that it was trained on, none that selected its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

TRAINED_ON = "reward"
SELECTED_BY = "referee"
JUDGE = "judge"
MODELS = Path("models")


def final_judges(names: Iterable[str]) -> list[str]:
    """Return those of the judges ``names`` that decide, in alphabetical order.

    Evaluations of earlier versions have no ``judge``: there the referee stands in, which is a little too favourable,
    since the checkpoint was selected by it on other prompts.
    """
    known = sorted(set(names) - {TRAINED_ON})
    return [name for name in known if name != SELECTED_BY or JUDGE not in known]


def stand_in_note(names: Iterable[str]) -> str:
    """Say that the referee stands in for the judge, if it is one of the deciding judges ``names``; else empty."""
    return "there is no judge: the referee stands in, which selected the checkpoint" if SELECTED_BY in names else ""


def judging_model(workspace: Path) -> str:
    """Return the name of the model that judges in ``workspace``: the referee where an earlier version trained no judge.

    Its folder is the one of that name in ``models``.
    """
    return JUDGE if (workspace / MODELS / JUDGE).is_dir() else SELECTED_BY

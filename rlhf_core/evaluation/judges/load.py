"""Load a judge with scores by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf_core.evaluation.judges.gold import GoldJudge
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.judges.pairwise import Judge


def load_judge(name: str, folders: Mapping[str, Path], batch_size: int) -> Judge:
    """Return the gold judge, or the model in ``folders[name]``, which scores ``batch_size`` replies at once."""
    return GoldJudge() if name == "gold" else ModelJudge.load(folders[name], name, batch_size)

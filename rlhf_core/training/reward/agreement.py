"""Agreement of two reward models on the same pairs, from the rewards that their stages wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlhf_core.data.correlation import linear_correlation, rank_correlation
from rlhf_core.errors import DataError
from rlhf_core.storage.files import read_json
from rlhf_core.training.reward.evaluation import agreement


def agreement_metrics(first: Path, second: Path) -> dict[str, float]:
    """Compare the rewards of two models on the pairs that both have scored.

    Returns:
        ``share`` is the share of pairs that both rank alike; the others are correlations of rewards and of margins.

    Raises:
        DataError: They have no pair in common.
    """
    tables = [_read_scores(path) for path in (first, second)]
    common = sorted(tables[0].keys() & tables[1].keys())
    if not common:
        raise DataError(f"{first} and {second} have no pair in common; run their stages again")
    a, b = (np.array([table[row] for row in common]) for table in tables)
    margins = a[:, 0] - a[:, 1], b[:, 0] - b[:, 1]
    return {
        "pairs": float(len(common)),
        "share": agreement(*margins),
        "score_correlation": linear_correlation(a.ravel(), b.ravel()),
        "score_rank_correlation": rank_correlation(a.ravel(), b.ravel()),
        "margin_correlation": linear_correlation(*margins),
    }


def _read_scores(path: Path) -> dict[str, tuple[float, float]]:
    table = read_json(path)
    return {row: (c, r) for row, c, r in zip(table["ids"], table["chosen"], table["rejected"], strict=True)}

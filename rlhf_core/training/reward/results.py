"""Pages about a reward model: plots of margins and calibration, and the pairs that it gets most wrong.

Many of those (Zheng et al. 2023, "Secrets of RLHF", table 1) are mislabelled or ambiguous; the rest show what the model
does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from rlhf_core.training.reward.evaluation import calibration_bins
from rlhf_core.training.reward.run import Split
from rlhf_core.training.reward.trainer import PairScores

SIZE = (4.6, 3.0)  # inches; the letters are then as large as those of the report


def draw_reward_plots(folder: Path, margins: Mapping[str, np.ndarray]) -> None:
    """Write ``margins.svg`` and ``calibration.svg`` into ``folder``. ``margins``: split -> (B,)."""
    folder.mkdir(parents=True, exist_ok=True)
    with _plot(folder / "margins.svg", "Reward margin of the preferred reply", "r(chosen) - r(rejected)") as axes:
        every = np.concatenate(list(margins.values()))
        edges = np.linspace(every.min(), max(every.max(), every.min() + 1e-6), 41)
        for split, values in margins.items():
            axes.hist(values, bins=list(edges), alpha=0.55, density=True, label=f"{split}, mean {values.mean():.2f}")
        axes.axvline(0.0, color="black", linewidth=1)
        axes.set(ylabel="density")
    with _plot(folder / "calibration.svg", "Calibration", "confidence: sigma(|margin|)") as axes:
        axes.plot([0.5, 1.0], [0.5, 1.0], color="black", linewidth=1, label="perfect")
        for split, values in margins.items():
            confidence, correct, _ = zip(*calibration_bins(values), strict=True)
            axes.plot(confidence, correct, marker="o", label=split)
        axes.set(ylabel="share ranked as people did")


@contextmanager
def _plot(path: Path, title: str, xlabel: str) -> Iterator[Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    yield axes
    axes.set(title=title, xlabel=xlabel)
    axes.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "reward"}):
        # No software version or date inside: the same numbers give the same file.
        figure.savefig(path, metadata={"Creator": None, "Date": None})


KEPT = 10


def worst_mistakes(scores: PairScores, split: Split, kept: int = KEPT) -> list[dict[str, Any]]:
    """Return the pairs with the most negative margins, worst first; fewer where fewer are ranked wrongly."""
    worst = np.argsort(scores.margins, kind="stable")[:kept]
    return [
        {
            "id": row.id,
            "category": row.category,
            "prompt": "\n".join(f"{message.role}: {message.content}" for message in row.prompt),
            "chosen": row.chosen,
            "rejected": row.rejected,
            "margin": float(scores.margins[i]),
            "reward_chosen": float(scores.chosen[i]),
            "reward_rejected": float(scores.rejected[i]),
            "tokens_chosen": len(pair.chosen),
            "tokens_rejected": len(pair.rejected),
        }
        for i, row, pair in ((i, split.rows[i], split.pairs[i]) for i in worst.tolist() if scores.margins[i] < 0)
    ]

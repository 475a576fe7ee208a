"""Pages about a reward model: plots of margins, calibration and training, and the pairs that it gets most wrong.

Many of those (Zheng et al. 2023, "Secrets of RLHF", table 1) are mislabelled or ambiguous; the rest show what the model
does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlhf_core.training.reward.evaluation import calibration_bins
from rlhf_core.training.reward.run import Split
from rlhf_core.training.reward.trainer import PairScores

SIZE = (6.4, 4.0)


def draw_reward_plots(folder: Path, margins: Mapping[str, np.ndarray], history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``margins.png``, ``calibration.png`` and ``curves.png`` into ``folder``. ``margins``: split -> (B,)."""
    folder.mkdir(parents=True, exist_ok=True)
    with _plot(folder / "margins.png", "Reward margin of the preferred reply", "r(chosen) - r(rejected)") as axes:
        every = np.concatenate(list(margins.values()))
        edges = np.linspace(every.min(), max(every.max(), every.min() + 1e-6), 41)
        for split, values in margins.items():
            axes.hist(values, bins=list(edges), alpha=0.55, density=True, label=f"{split}, mean {values.mean():.2f}")
        axes.axvline(0.0, color="black", linewidth=1)
        axes.set(ylabel="density")
    with _plot(folder / "calibration.png", "Calibration", "confidence: sigma(|margin|)") as axes:
        axes.plot([0.5, 1.0], [0.5, 1.0], color="black", linewidth=1, label="perfect")
        for split, values in margins.items():
            confidence, correct, _ = zip(*calibration_bins(values), strict=True)
            axes.plot(confidence, correct, marker="o", label=split)
        axes.set(ylabel="share ranked as people did")
    with _plot(folder / "curves.png", "Training", "step") as axes:
        for name, marker in (("ranking_loss", ""), ("validation_loss", "o"), ("validation_accuracy", "s")):
            points = [(record["step"], record[name]) for record in history if name in record]
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, label=name.replace("_", " "))


@contextmanager
def _plot(path: Path, title: str, xlabel: str) -> Iterator[Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    yield axes
    axes.set(title=title, xlabel=xlabel)
    axes.legend()
    # No software version or date inside: the same numbers give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})


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

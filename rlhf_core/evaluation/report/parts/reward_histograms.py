"""The distribution of rewards over the iterations of PPO, as histograms (paper, appendix A)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from rlhf_core.evaluation.figures.svg_figure import COLOURS, SERIES, draw_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Edges of the bins, as the history has them, and the share of the rollout's rewards in each bin.
EDGES = ("reward_min", "reward_p05", "reward_p25", "reward_p50", "reward_p75", "reward_p95", "reward_max")
SHARES = (0.05, 0.20, 0.25, 0.25, 0.20, 0.05)
MOST_ROWS = 8
ROW_HEIGHT, AXIS_HEIGHT = 34, 50
OVERLAP = 0.9  # height of the highest bin, in rows


def reward_histograms(history: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Draw the raw rewards of up to eight iterations below each other, first and last among them; None without any.

    The history has percentiles, so bins end at those: the area of a bin is its share, as in any histogram.
    """
    rows = [row for row in history if all(_finite(row.get(name)) for name in EDGES)]
    if not rows:
        return None
    count = min(MOST_ROWS, len(rows))
    chosen = [rows[round(i * (len(rows) - 1) / max(count - 1, 1))] for i in range(count)]

    def draw(axes: Axes) -> None:
        for y, row in enumerate(chosen):
            xs, heights = histogram([float(row[name]) for name in EDGES])
            top = max(heights)
            axes.fill_between(
                xs,
                [y] * len(xs),
                [y - OVERLAP * height / top for height in heights],
                color=SERIES[0],
                alpha=0.5,
                linewidth=0,
            )
            axes.axhline(y, color=COLOURS["line"], linewidth=1)
            axes.plot([row["reward_p50"]] * 2, [y, y - OVERLAP], color=SERIES[1], linewidth=2)
        axes.set_yticks(range(count), [f"{row.get('iteration', '')}" for row in chosen])
        axes.set_ylim(count - 0.5, -1.2)
        axes.locator_params(axis="x", nbins=5)
        axes.set_ylabel("iteration", color=COLOURS["soft"])
        axes.set_xlabel("reward", color=COLOURS["soft"], loc="right")

    return draw_svg(draw, "distribution of rewards by iteration", ROW_HEIGHT * (count + 1) + AXIS_HEIGHT)


def histogram(edges: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the corners (x) of the bins between ``edges`` and the density at each; bins without width are left out.

    Rewards that are all the same are one narrow bin.
    """
    bins = [(low, high, share) for low, high, share in zip(edges, edges[1:], SHARES, strict=False) if high > low]
    if not bins:
        width = max(abs(edges[0]), 1.0) / 100
        bins = [(edges[0] - width, edges[0] + width, 1.0)]
    xs = [x for low, high, _ in bins for x in (low, high)]
    return xs, [share / (high - low) for low, high, share in bins for _ in range(2)]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

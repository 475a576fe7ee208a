"""The report's charts: lines over bands, intervals, and shares of wins, ties and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from rlhf_core.evaluation.figures import COLOURS, HEIGHT, SERIES, draw_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
ROW_HEIGHT, AXIS_HEIGHT = 34, 40
BAND_OPACITY = (0.14, 0.24)


@dataclass(frozen=True)
class Series:
    """A named line. Points whose y is not finite break it; a single point is a dot. ``scattered`` has no line."""

    label: str
    points: list[Point]
    scattered: bool = False


@dataclass(frozen=True)
class Band:
    """A filled range: lower and upper edge over the same x values."""

    label: str
    low: list[Point]
    high: list[Point]


@dataclass(frozen=True)
class Outcomes:
    """Shares of prompts that each side wins, and the candidate's win rate with its 95 % interval."""

    label: str
    lose: float
    tie: float
    win: float
    win_rate: float
    low95: float
    high95: float
    prompts: int


def line_chart(
    series: Sequence[Series],
    bands: Sequence[Band] = (),
    x_label: str = "step",
    title: str = "",
    marks: Sequence[float] = (),
) -> Markup:
    """Draw lines over bands, with a legend for more than one of them and a vertical rule at each x of ``marks``."""
    points = [p for s in series for p in s.points] + [p for b in bands for p in (*b.low, *b.high)]
    if not any(math.isfinite(y) for _, y in points):
        return Markup('<p class="missing">no finite values</p>')

    def draw(axes: Axes) -> None:
        axes.grid(axis="y", color=COLOURS["line"])
        axes.set_xlabel(x_label, color=COLOURS["soft"], loc="right")
        axes.locator_params(axis="both", nbins=5)
        for band, opacity in zip(bands, BAND_OPACITY, strict=False):
            xs = [x for x, _ in band.low]
            low, high = ([y for _, y in edge] for edge in (band.low, band.high))
            axes.fill_between(xs, low, high, color=SERIES[0], alpha=opacity, linewidth=0)
        for line, colour in zip(series, SERIES, strict=False):
            xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
            if line.scattered:
                axes.plot(xs, ys, color=colour, linestyle="", marker="o", markersize=4, alpha=0.5)
            else:
                axes.plot(xs, ys, color=colour, linewidth=2, marker="o" if len(xs) == 1 else "", markersize=9)
        for x in marks:
            axes.axvline(x, color=COLOURS["open"], linewidth=1.5, linestyle=":")

    names = [(f"s{i}", s.label) for i, s in enumerate(series)] + [(f"b{i}", b.label) for i, b in enumerate(bands)]
    if marks:
        names.append(("mark", "health finding"))
    return draw_svg(draw, title, HEIGHT) + (_legend(names) if len(names) > 1 else Markup())


def interval_chart(rows: Sequence[tuple[str, float, float, float]], centre: float, title: str = "") -> Markup:
    """Draw one interval per (label, low, value, high) in [0, 1], with a vertical rule at ``centre``."""

    def draw(axes: Axes) -> None:
        axes.axvline(centre, color=COLOURS["soft"], linestyle="--", linewidth=1)
        for y, (_, low, value, high) in enumerate(rows):
            axes.plot([low, high], [y, y], color=SERIES[0], linewidth=3)
            axes.plot([value], [y], color=SERIES[0], marker="o", markersize=9)
        axes.set_xlim(0, 1)
        _label_rows(axes, [label for label, *_ in rows])

    return draw_svg(draw, title, ROW_HEIGHT * len(rows) + AXIS_HEIGHT)


def outcome_chart(
    rows: Sequence[Outcomes], title: str = "", baseline: str = "SFT", candidate: str = "policy"
) -> Markup:
    """Draw a bar per row: from the left the shares of prompts that the baseline wins, ties, and the candidate wins."""

    def draw(axes: Axes) -> None:
        for y, row in enumerate(rows):
            left = 0.0
            for share, colour in ((row.lose, SERIES[1]), (row.tie, COLOURS["line"]), (row.win, SERIES[0])):
                axes.barh(y, share, left=left, color=colour, height=0.62)
                left += share
            label = f"{row.win_rate:.2f} ({row.low95:.2f} to {row.high95:.2f}), n {row.prompts}"
            axes.text(1.02, y, label, va="center", color=COLOURS["soft"])
        axes.axvline(0.5, color=COLOURS["soft"], linestyle="--", linewidth=1)
        axes.set_xlim(0, 1)
        _label_rows(axes, [row.label for row in rows])

    legend = _legend([("s1", f"{baseline} wins"), ("tie", "tie"), ("s0", f"{candidate} wins")])
    return draw_svg(draw, title, ROW_HEIGHT * len(rows) + AXIS_HEIGHT) + legend


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), [label.replace("$", r"\$") for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)  # the first row on top
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])


def _legend(names: Sequence[tuple[str, str]]) -> Markup:
    items = [Markup('<span><i class="key {}"></i>{}</span>').format(css, label) for css, label in names]
    return Markup('<div class="legend">{}</div>').format(Markup("").join(items))

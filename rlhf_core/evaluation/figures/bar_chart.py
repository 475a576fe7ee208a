"""A bar chart, for histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from rlhf_core.evaluation.figures.format_number import format_number
from rlhf_core.evaluation.figures.svg_figure import COLOURS, SERIES, draw_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS, FONT_SIZE = 6, 17  # at most so many labels fit below the axis


def bar_chart(labels: Sequence[str], values: Sequence[float], title: str) -> Markup:
    """Draw a bar per value over its label, and the largest value above its bar; all values are read aloud."""

    def draw(axes: Axes) -> None:
        axes.bar(range(len(values)), values, width=0.92, color=SERIES[0])
        every = -(-len(labels) // MOST_LABELS)
        axes.set_xticks(range(0, len(labels), every), [label.replace("$", r"\$") for label in labels[::every]])
        axes.tick_params(labelsize=FONT_SIZE)
        axes.set_yticks([])
        axes.axhline(0, color=COLOURS["line"], linewidth=1)
        axes.margins(x=0.01, y=0.14)
        largest = max(range(len(values)), key=values.__getitem__)
        axes.annotate(
            format_number(values[largest]),
            (largest, values[largest]),
            (0, 4),
            textcoords="offset points",
            ha="center",
            color=COLOURS["soft"],
            fontsize=FONT_SIZE,
        )

    listed = ", ".join(f"{label}: {format_number(value)}" for label, value in zip(labels, values, strict=True))
    return draw_svg(draw, f"{title}; {listed}")

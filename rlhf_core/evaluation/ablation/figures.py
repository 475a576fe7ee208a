"""One picture per figure of an ablation: curves over the iterations, and end values with intervals. No display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from rlhf_core.config.ablation import CURVES, METRICS, FigurePlan
from rlhf_core.evaluation.ablation.intervals import SeedTable
from rlhf_core.evaluation.ablation.results import RunResult

COLUMNS = 3
PANEL = (4.6, 3.1)
COLOURS = colormaps["tab10"]
SPARSE = 6  # curves of so few points get marks
WIDE = 10.0  # values above it are drawn on a logarithmic scale, where a curve allows that

Colour = tuple[float, float, float, float]


def draw_figure(path: Path, plan: FigurePlan, results: Sequence[RunResult]) -> bool:
    """Write the picture (PNG) to ``path``; return False when none of its variants has a result."""
    variants = [name for name in plan.variants if any(r.values and r.run.variant == name for r in results)]
    if not variants:
        return False
    panels = len(plan.curves) + len(plan.ends)
    rows = math.ceil(panels / COLUMNS)
    figure = Figure(figsize=(PANEL[0] * COLUMNS, PANEL[1] * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, COLUMNS, number + 1) for number in range(panels)]
    # Colours by position in the plan, so that a variant keeps its own when another has no result.
    colours = {name: COLOURS(number % COLOURS.N) for number, name in enumerate(plan.variants)}
    for panel, name in zip(axes, plan.curves, strict=False):
        _draw_curve(panel, name, {variant: colours[variant] for variant in variants}, results)
    for panel, metric in zip(axes[len(plan.curves) :], plan.ends, strict=True):
        _draw_end_values(panel, metric, {variant: colours[variant] for variant in variants}, SeedTable(results))
    figure.suptitle(plan.title)
    handles = [Line2D([], [], color=colours[name], label=name, linewidth=2) for name in variants]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No software version or date inside: the same numbers give the same file.
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return True


def curve(results: Sequence[RunResult], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the iterations (n,) at which every run has ``name``, and its values (runs, n); None if there are none."""
    rows = [{row["iteration"]: row[name] for row in r.history if row.get(name) is not None} for r in results]
    rows = [row for row in rows if row]
    shared = sorted(set.intersection(*(set(row) for row in rows))) if rows else []
    if not shared:
        return None
    return np.array(shared), np.array([[row[step] for step in shared] for row in rows], dtype=np.float64)


def _draw_curve(panel: Axes, name: str, colours: dict[str, Colour], results: Sequence[RunResult]) -> None:
    """Draw each variant's mean over seeds, with the range of the seeds as a shade."""
    for variant, colour in colours.items():
        points = curve([r for r in results if r.run.variant == variant], name)
        if points is not None:
            x, y = points
            marker = "o" if len(x) <= SPARSE else ""
            panel.plot(x, y.mean(axis=0), color=colour, linewidth=1.4, marker=marker, markersize=4)
            panel.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    panel.set_title(CURVES[name].label, fontsize=10)
    panel.set_xlabel("iteration", fontsize=8)
    if CURVES[name].log and panel.get_ylim()[1] > WIDE:
        lowest = panel.get_ylim()[0]
        panel.set_yscale("symlog", linthresh=1.0)
        panel.set_ylim(bottom=min(max(lowest, -1.0), 0.0))
        panel.yaxis.set_major_formatter("{x:g}")
    _style_axes(panel)


def _draw_end_values(panel: Axes, name: str, colours: dict[str, Colour], table: SeedTable) -> None:
    """Draw each variant's seeds as small dots, and their mean as a large one with its interval."""
    metric = METRICS[name]
    for height, (variant, colour) in enumerate(reversed(colours.items())):
        seeds = list(table.by_seed(variant, name).values())
        points = [math.exp(v) if metric.kind == "ratio" else v for v in seeds]
        panel.plot(points, [height + 0.22] * len(points), "o", color=colour, markersize=3, alpha=0.6)
        level = table.level(variant, name).in_readers_unit(metric)
        if level.n > 1:
            panel.plot([level.low, level.high], [height, height], color=colour, linewidth=2)
        panel.plot([level.mean], [height], "o", color=colour, markersize=6)
    panel.set_yticks(range(len(colours)), list(reversed(colours)), fontsize=7)
    panel.set_ylim(-0.6, len(colours) - 0.4)
    panel.set_title(metric.label, fontsize=10)
    if metric.kind == "ratio":
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
    _style_axes(panel)


def _style_axes(panel: Axes) -> None:
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25, linewidth=0.6)

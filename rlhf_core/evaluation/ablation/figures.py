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

from rlhf_core.config.ablation.ablation import FigurePlan
from rlhf_core.config.ablation.metrics import CURVES, METRICS
from rlhf_core.evaluation.ablation.intervals import Table
from rlhf_core.evaluation.ablation.results import Result

COLUMNS = 3
PANEL = (4.6, 3.1)
COLOURS = colormaps["tab10"]
SPARSE = 6  # curves of so few points get marks
WIDE = 10.0  # values above it are drawn on a logarithmic scale, where a curve allows that


def draw(path: Path, plan: FigurePlan, results: Sequence[Result]) -> bool:
    """Write the picture (PNG) to ``path``; False when none of its variants has a result."""
    variants = [name for name in plan.variants if any(r.values and r.run.variant == name for r in results)]
    if not variants:
        return False
    panels = len(plan.curves) + len(plan.ends)
    rows = math.ceil(panels / COLUMNS)
    figure = Figure(figsize=(PANEL[0] * COLUMNS, PANEL[1] * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, COLUMNS, place + 1) for place in range(panels)]
    for panel, name in zip(axes, plan.curves, strict=False):
        _draw_curve(panel, name, plan, variants, results)
    for panel, metric in zip(axes[len(plan.curves) :], plan.ends, strict=True):
        _draw_ends(panel, metric, plan, variants, Table(results))
    figure.suptitle(plan.title)
    _draw_legend(figure, plan, variants)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No software version or date inside: the same numbers give the same file.
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return True


def _draw_curve(panel: Axes, name: str, plan: FigurePlan, variants: Sequence[str], results: Sequence[Result]) -> None:
    """The mean over seeds, and the range of the seeds as a shade."""
    for variant in variants:
        found = curve([r for r in results if r.run.variant == variant], name)
        if found is not None:
            x, y = found
            marker = "o" if len(x) <= SPARSE else ""
            panel.plot(x, y.mean(axis=0), color=_colour(plan, variant), linewidth=1.4, marker=marker, markersize=4)
            panel.fill_between(x, y.min(axis=0), y.max(axis=0), color=_colour(plan, variant), alpha=0.12, linewidth=0)
    panel.set_title(CURVES[name].label, fontsize=10)
    panel.set_xlabel("iteration", fontsize=8)
    if CURVES[name].log and panel.get_ylim()[1] > WIDE:
        lowest = panel.get_ylim()[0]
        panel.set_yscale("symlog", linthresh=1.0)
        panel.set_ylim(bottom=min(max(lowest, -1.0), 0.0))
        panel.yaxis.set_major_formatter("{x:g}")
    _quiet(panel)


def curve(results: Sequence[Result], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Iterations (n,) at which every run has ``name``, and its values (runs, n); None when there are none."""
    rows = [{row["iteration"]: row[name] for row in r.history if row.get(name) is not None} for r in results]
    rows = [row for row in rows if row]
    shared = sorted(set.intersection(*(set(row) for row in rows))) if rows else []
    if not shared:
        return None
    return np.array(shared), np.array([[row[step] for step in shared] for row in rows], dtype=np.float64)


def _draw_ends(panel: Axes, name: str, plan: FigurePlan, variants: Sequence[str], table: Table) -> None:
    """Seeds as small dots, their mean as a large one with its interval."""
    metric = METRICS[name]
    for place, variant in enumerate(reversed(variants)):
        found, colour = table.level(variant, name), _colour(plan, variant)
        seeds = list(table.by_seed(variant, name).values())
        points = [math.exp(v) if metric.kind == "ratio" else v for v in seeds]
        panel.plot(points, [place + 0.22] * len(points), "o", color=colour, markersize=3, alpha=0.6)
        shown = found.map(metric)
        if found.n > 1:
            panel.plot([shown.low, shown.high], [place, place], color=colour, linewidth=2)
        panel.plot([shown.mean], [place], "o", color=colour, markersize=6)
    panel.set_yticks(range(len(variants)), list(reversed(variants)), fontsize=7)
    panel.set_ylim(-0.6, len(variants) - 0.4)
    panel.set_title(metric.label, fontsize=10)
    if metric.kind == "ratio":
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
    _quiet(panel)


def _quiet(panel: Axes) -> None:
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25, linewidth=0.6)


def _colour(plan: FigurePlan, variant: str) -> tuple[float, float, float, float]:
    red, green, blue, alpha = COLOURS(plan.variants.index(variant) % COLOURS.N)
    return red, green, blue, alpha


def _draw_legend(figure: Figure, plan: FigurePlan, variants: Sequence[str]) -> None:
    handles = [Line2D([], [], color=_colour(plan, name), label=name, linewidth=2) for name in variants]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=8, frameon=False)

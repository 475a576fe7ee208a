"""The report's charts: intervals, shares of wins, and which curves are drawn from which history.

Names that a history lacks are left out. Over-optimisation shows as what reward model and judges say
while the policy moves away from SFT (Gao et al. 2022): a reward that goes on rising where the
judges' scores fall is the sign that the policy exploits the reward model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from ruamel.yaml import YAML

from rlhf_core.evaluation.figures import (
    COLOURS,
    HEIGHT,
    SERIES,
    draw_svg,
    format_interval,
    format_number,
)
from rlhf_core.evaluation.report.metrics import healthy_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
ROW_HEIGHT = 34
AXIS_HEIGHT = 40
BAND_OPACITY = (0.14, 0.24)
OUTCOMES = {"lose": SERIES[1], "tie": COLOURS["line"], "win": SERIES[0]}  # from left to right


def line_chart(
    lines: Mapping[str, Sequence[Point]],
    bands: Mapping[str, tuple[Sequence[Point], Sequence[Point]]] | None = None,
    x_label: str = "step",
    title: str = "",
    marks: Sequence[float] = (),
    scattered: Collection[str] = (),
) -> Markup:
    """Draw lines over bands, with a legend for more than one of them.

    Args:
        lines: By label. Points whose y is not finite break a line; a single point is a dot.
        bands: Filled ranges by label: lower and upper edge over the same x values.
        x_label: Name of the x axis.
        title: Read aloud in place of the picture.
        marks: Where vertical rules stand.
        scattered: Labels of lines that are drawn as points only.
    """
    bands = bands or {}
    drawn = [*lines.values()]
    for edges in bands.values():
        drawn += edges
    if not any(math.isfinite(y) for line in drawn for _, y in line):
        return Markup('<p class="missing">no finite values</p>')

    def draw(axes: Axes) -> None:
        axes.grid(axis="y", color=COLOURS["line"])
        axes.set_xlabel(x_label, color=COLOURS["soft"], loc="right")
        axes.locator_params(axis="both", nbins=5)
        for (low, high), opacity in zip(bands.values(), BAND_OPACITY, strict=False):
            xs = [x for x, _ in low]
            lows = [y for _, y in low]
            highs = [y for _, y in high]
            axes.fill_between(xs, lows, highs, color=SERIES[0], alpha=opacity, linewidth=0)
        for (label, line), colour in zip(lines.items(), SERIES, strict=False):
            xs = [x for x, _ in line]
            ys = [y for _, y in line]
            style: dict[str, Any] = {"linewidth": 2, "marker": "", "markersize": 9}
            if label in scattered:
                style = {"linestyle": "", "marker": "o", "markersize": 4, "alpha": 0.5}
            elif len(xs) == 1:
                style["marker"] = "o"
            axes.plot(xs, ys, color=colour, **style)
        for x in marks:
            axes.axvline(x, color=COLOURS["open"], linewidth=1.5, linestyle=":")

    names = [(f"s{i}", label) for i, label in enumerate(lines)]
    names += [(f"b{i}", label) for i, label in enumerate(bands)]
    if marks:
        names.append(("mark", "health finding"))
    chart = draw_svg(draw, title, HEIGHT)
    if len(names) > 1:
        return chart + _legend(names)
    return chart


def interval_chart(
    rows: Sequence[tuple[str, float, float, float]], centre: float, title: str = ""
) -> Markup:
    """Draw an interval per (label, low, value, high) in [0, 1], and a rule at ``centre``."""

    def draw(axes: Axes) -> None:
        axes.axvline(centre, color=COLOURS["soft"], linestyle="--", linewidth=1)
        for y, (_, low, value, high) in enumerate(rows):
            axes.plot([low, high], [y, y], color=SERIES[0], linewidth=3)
            axes.plot([value], [y], color=SERIES[0], marker="o", markersize=9)
        axes.set_xlim(0, 1)
        _label_rows(axes, [label for label, *_ in rows])

    return draw_svg(draw, title, ROW_HEIGHT * len(rows) + AXIS_HEIGHT)


def outcome_chart(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    title: str,
    baseline: str = "SFT",
    candidate: str = "policy",
) -> Markup:
    """Draw a bar per (label, comparison): what the baseline wins, ties, what the candidate wins.

    Beside it stand the win rate with its interval, the number of prompts, and that of different
    questions, over which the interval is taken.
    """

    def draw(axes: Axes) -> None:
        for y, (_, row) in enumerate(rows):
            left = 0.0
            for outcome, colour in OUTCOMES.items():
                share = row[outcome]
                axes.barh(y, share, left=left, color=colour, height=0.62)
                left += share
            rate = format_number(row["win_rate"], 2)
            ends = format_interval(row["win_rate_low95"], row["win_rate_high95"])
            label = f"{rate} ({ends}), {row['prompts']} / {row['clusters']}"
            axes.text(1.02, y, label, va="center", color=COLOURS["soft"])
        axes.axvline(0.5, color=COLOURS["soft"], linestyle="--", linewidth=1)
        axes.set_xlim(0, 1)
        _label_rows(axes, [label for label, _ in rows])

    names = [("s1", f"{baseline} wins"), ("tie", "tie"), ("s0", f"{candidate} wins")]
    height = ROW_HEIGHT * len(rows) + AXIS_HEIGHT
    return draw_svg(draw, title, height) + _legend(names)


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), [label.replace("$", r"\$") for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)  # the first row on top
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])


def _legend(names: Sequence[tuple[str, str]]) -> Markup:
    items = Markup()
    for css, label in names:
        items += Markup('<span><i class="key {}"></i>{}</span>').format(css, label)
    return Markup('<div class="legend">{}</div>').format(items)


STEP_NAMES = ("iteration", "step", "rollout")


@cache
def chart_specs() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return what is drawn from which history, from ``charts.yaml``."""
    file = Path(__file__).with_suffix(".yaml")
    specs: dict[str, list[dict[str, Any]]] = YAML(typ="safe").load(file)
    return specs


def draw_charts(
    histories: Mapping[str, Sequence[Mapping[str, Any]]], findings: Sequence[float]
) -> dict[str, list[dict[str, Any]]]:
    """Draw the charts of :func:`chart_specs` that have lines, by history.

    Args:
        histories: Rows of ``history/NAME.jsonl`` by stage.
        findings: Iterations of PPO with a health finding, which its charts mark.

    Returns:
        ``title``, ``svg`` and ``note`` of each.
    """
    charts: dict[str, list[dict[str, Any]]] = {}
    for history, specs in chart_specs().items():
        rows = histories.get(history, [])
        known: set[str] = set()
        for row in rows:
            known.update(row)
        x_label = next((name for name in STEP_NAMES if name in known), "row")
        marks = findings if history == "ppo" else ()
        for spec in specs:
            lines: dict[str, list[Point]] = {}
            bands: dict[str, tuple[list[Point], list[Point]]] = {}
            for label, names in spec["curves"].items():
                if isinstance(names, str):
                    if line := points(rows, names):
                        lines[label] = line
                    continue
                low, high = (points(rows, name) for name in names)
                if low and high:
                    bands[label] = low, high
            if not lines:
                continue
            title = spec["title"]
            svg = line_chart(lines, bands, x_label, f"{history}: {title}", marks)
            first = next(iter(spec["curves"].values()))
            note = spec.get("note") or healthy_of(f"history/{history}.jsonl", first)
            charts.setdefault(history, []).append({"title": title, "svg": svg, "note": note})
    return charts


def points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return (step, value) of the rows that have ``name`` as a finite number."""
    line = []
    for number, row in enumerate(rows, start=1):
        if not _finite(row.get(name)):
            continue
        step = float(number)
        for key in reversed(STEP_NAMES):
            if isinstance(row.get(key), int | float):
                step = float(row[key])
        line.append((step, float(row[name])))
    return line


# What is known in every iteration: the metric, and what the chart calls it.
TRAINING = {"reward": ("reward_mean", "reward model"), "referee": ("referee_mean", "referee")}
JUDGED = ("judge", "gold")


def over_optimization_chart(
    history: Sequence[Mapping[str, Any]],
    evaluation: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> Markup | None:
    """Draw gains in standard deviations of SFT's scores against √KL; None without KL or scores.

    Reward model and referee are known in every iteration of PPO, as gains over the first; judge and
    gold score only the policy that was selected, as dots.
    """
    spread = {}
    for name in (*TRAINING, *JUDGED):
        if rows and f"sft_{name}" in rows[0]:
            spread[name] = float(np.std([row[f"sft_{name}"] for row in rows])) or 1.0
    lines: dict[str, list[Point]] = {}
    for name, (metric, label) in TRAINING.items():
        if name not in spread:
            continue
        measured = [row for row in history if _finite(row.get("kl")) and _finite(row.get(metric))]
        gains: list[Point] = []
        for row in measured:
            gain = (row[metric] - measured[0][metric]) / spread[name]
            gains.append((_distance(row["kl"]), gain))
        if gains:
            lines[f"{label}, in training"] = gains
    if not lines:
        return None
    scattered = set(lines)
    sft = evaluation.get("sft", {})
    policy = evaluation.get("policy", {})
    kl = evaluation.get("kl")
    for name in JUDGED:
        if name in spread and name in policy and _finite(kl):
            gain = (policy[name] - sft[name]) / spread[name]
            lines[f"{name}, selected policy"] = [(_distance(kl), gain)]
    title = "gain in score against the distance from SFT"
    return line_chart(lines, x_label="√KL from SFT, nats", title=title, scattered=scattered)


def _distance(kl: Any) -> float:
    """Return √KL, which grows about as a policy moves; an estimate below 0 counts as 0."""
    return math.sqrt(max(kl, 0.0))


def _finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


# Edges of the bins, as the history has them, and the share of the rollout's rewards in each bin.
EDGES = (
    "reward_min",
    "reward_p05",
    "reward_p25",
    "reward_p50",
    "reward_p75",
    "reward_p95",
    "reward_max",
)
SHARES = (0.05, 0.20, 0.25, 0.25, 0.20, 0.05)
MOST_ROWS = 8
HISTOGRAM_AXIS_HEIGHT = 50
OVERLAP = 0.9  # height of the highest bin, in rows


def reward_histograms(history: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Draw the raw rewards of up to eight iterations below each other; None without any.

    The first and the last iteration are among them. The history has percentiles, so bins end at
    those: the area of a bin is its share, as in any histogram.
    """
    rows = []
    for row in history:
        if all(_finite(row.get(name)) for name in EDGES):
            rows.append(row)
    if not rows:
        return None
    count = min(MOST_ROWS, len(rows))
    last = len(rows) - 1
    steps = max(count - 1, 1)
    chosen = [rows[round(number * last / steps)] for number in range(count)]

    def draw(axes: Axes) -> None:
        for y, row in enumerate(chosen):
            edges = [float(row[name]) for name in EDGES]
            xs, densities = histogram(edges)
            top = max(densities)
            heights = [y - OVERLAP * density / top for density in densities]
            axes.fill_between(xs, y, heights, color=SERIES[0], alpha=0.5, linewidth=0)
            axes.axhline(y, color=COLOURS["line"], linewidth=1)
            median = row["reward_p50"]
            axes.plot([median, median], [y, y - OVERLAP], color=SERIES[1], linewidth=2)
        axes.set_yticks(range(count), [f"{row.get('iteration', '')}" for row in chosen])
        axes.set_ylim(count - 0.5, -1.2)
        axes.locator_params(axis="x", nbins=5)
        axes.set_ylabel("iteration", color=COLOURS["soft"])
        axes.set_xlabel("reward", color=COLOURS["soft"], loc="right")

    height = ROW_HEIGHT * (count + 1) + HISTOGRAM_AXIS_HEIGHT
    return draw_svg(draw, "distribution of rewards by iteration", height)


def histogram(edges: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the corners (x) of the bins between ``edges``, and the density at each.

    Bins without width are left out. Rewards that are all the same are one narrow bin.
    """
    bins = []
    for low, high, share in zip(edges, edges[1:], SHARES, strict=False):
        if high > low:
            bins.append((low, high, share))
    if not bins:
        width = max(abs(edges[0]), 1.0) / 100
        bins = [(edges[0] - width, edges[0] + width, 1.0)]
    xs: list[float] = []
    densities: list[float] = []
    for low, high, share in bins:
        density = share / (high - low)
        xs += [low, high]
        densities += [density, density]
    return xs, densities

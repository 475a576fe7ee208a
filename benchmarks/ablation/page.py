"""The page of an ablation: figures, tables and verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.ablation.definition import CURVES, METRICS, Ablation, FigurePlan, Metric
from benchmarks.ablation.verdicts import (
    DONE,
    AblationRun,
    ClaimOutcome,
    ClaimVerdict,
    Interval,
    RunResult,
    SeedTable,
    judge_claims,
    read_results,
    write_csv,
)
from rlhf_core.data.statistics import rank_correlation
from rlhf_core.storage.files import atomic_write_json, atomic_write_text

WORST = (
    "gold_gain"  # of this the worst seed is told, too: where one of four collapses, a mean hides it
)
FEWEST_RANKED = 10  # runs; a rank correlation of fewer says nothing


def write_page(
    ablation: Ablation, results: Sequence[RunResult], pictures: Mapping[str, str]
) -> str:
    """Return the whole page: claims of the figures that were measured, every variant, and
    differences.

    Args:
        ablation: The definition.
        results: One per run.
        pictures: Links by figure, relative to where the page will be.
    """
    table = SeedTable(results)
    verdicts = judge_figures(ablation, table)
    variants = [
        name for name in ablation.names if any(result.run.variant == name for result in results)
    ]
    parts = [_head(results, verdicts)]
    parts += [
        _figure_section(figure, verdicts[figure.name], pictures.get(figure.name))
        for figure in ablation.figures
        if figure.name in verdicts
    ]
    parts += ["## Every variant", _level_table(ablation, variants, table)]
    parts += [f"## Against {ablation.reference}", _difference_table(ablation, variants, table)]
    if unfinished := [result.run for result in results if result.run.state != DONE]:
        lines = [
            f"- {run.variant}, seed {run.seed}: {run.state}. {run.message}".rstrip()
            for run in unfinished
        ]
        parts += ["## Not finished", *lines]
    return "\n\n".join(parts) + "\n"


def judge_figures(ablation: Ablation, table: SeedTable) -> dict[str, list[ClaimVerdict]]:
    """The verdicts on the claims of each figure one of whose claims was measured, by the figure's
    name.

    Claims that were not measured count among a figure's claims all the same, so that what is asked
    later costs nothing. A figure without claims has an empty list.
    """
    verdicts = {figure.name: judge_claims(figure.claims, table) for figure in ablation.figures}

    def measured(verdict: ClaimVerdict) -> bool:
        return all(item.interval.n > 1 for item in verdict.evidence)

    return {
        name: group for name, group in verdicts.items() if not group or any(map(measured, group))
    }


def _head(results: Sequence[RunResult], verdicts: Mapping[str, Sequence[ClaimVerdict]]) -> str:
    seeds = sorted({result.run.seed for result in results})
    done = sum(result.run.state == DONE for result in results)
    counts = Counter(verdict.outcome for group in verdicts.values() for verdict in group)
    by_outcome = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ClaimOutcome)
    claims = f" Of {counts.total()} claims: {by_outcome}." if counts else ""
    return (
        f"{done} of {len(results)} runs, seeds {', '.join(map(str, seeds))}.{claims}{_with_gold(results)}"
        "\n\n"
        "Values are means over seeds with 95 % intervals (Student's t); KL, length and perplexity are geometric means "
        "and compared as factors. Differences are paired: the same seed, hence the same SFT model, reward model, "
        "referee and held-out prompts."
        + (
            " p is Holm's over the claims of a figure, one-sided: of the verdict, or of what is nearer where it cannot "
            "tell; a verdict needs 0.025."
            if counts
            else ""
        )
    )


def _figure_section(
    figure: FigurePlan, verdicts: Sequence[ClaimVerdict], picture: str | None
) -> str:
    lines = [f"## {figure.title}", ""]
    if picture:
        lines += [f"![{figure.title}]({picture})", ""]
    if not verdicts:
        return "\n".join(lines).rstrip()
    lines += ["| claim | verdict | p | expected | measured |", "|---|---|---|---|---|"]
    for verdict in verdicts:
        for row, item in enumerate(verdict.evidence):
            first = (
                (verdict.says, f"**{verdict.outcome}**", f"{verdict.p:.2g}")
                if row == 0
                else ("", "", "")
            )
            lines.append(f"| {' | '.join(first)} | {item.expected} | {item.measured} |")
    return "\n".join(lines)


def _with_gold(results: Sequence[RunResult]) -> str:
    """Say in a sentence how reward and KL go with gold over the runs; empty where too few have all
    of them.
    """
    names = ("gold_gain", "reward_gain", "kl")
    rows = [
        [result.values[name] for name in names]
        for result in results
        if {*names} <= {*result.values}
    ]
    if len(rows) < FEWEST_RANKED:
        return ""
    gold, reward, kl = np.array(rows).T
    by_reward, by_kl = rank_correlation(reward, gold), rank_correlation(kl, gold)
    return f" Rank correlation with gold over all runs: reward {by_reward:.2f}, KL {by_kl:.2f}."


def _level_table(ablation: Ablation, variants: Sequence[str], table: SeedTable) -> str:
    labels = [METRICS[name].label for name in ablation.levels]
    rows = [["variant", "what it is", *labels, f"{METRICS[WORST].label}, worst seed"]]
    for name in variants:
        cells = (
            level_cell(table.level(name, metric), METRICS[metric]) for metric in ablation.levels
        )
        seeds = table.by_seed(name, WORST).values()
        rows.append(
            [name, ablation.variant(name).about, *cells, f"{min(seeds):.2f}" if seeds else "–"]
        )
    return _markdown_table(rows)


def _difference_table(ablation: Ablation, variants: Sequence[str], table: SeedTable) -> str:
    kinds = {
        name: "factor" if METRICS[name].kind == "ratio" else "difference"
        for name in ablation.differences
    }
    rows = [["variant", *(f"{METRICS[name].label}, {kind}" for name, kind in kinds.items())]]
    for name in variants:
        if name != ablation.reference:
            differences = (
                (metric, table.difference(name, ablation.reference, metric))
                for metric in ablation.differences
            )
            rows.append(
                [name, *(difference_cell(found, METRICS[metric]) for metric, found in differences)]
            )
    return "Bold: the interval excludes no difference.\n\n" + _markdown_table(rows)


def level_cell(interval: Interval, metric: Metric) -> str:
    """Format ``0.31 ± 0.12``, or ``1.9 (1.1 to 3.2)`` for ratio metrics; no interval from fewer
    than two seeds.
    """
    if interval.n == 0:
        return "–"
    level = interval.in_readers_unit(metric)
    if interval.n == 1:
        return _number(level.mean)
    if metric.kind == "ratio":
        return f"{_number(level.mean)} ({_number(level.low)} to {_number(level.high)})"
    return f"{_number(level.mean)} ± {_number(level.high - level.mean)}"


def difference_cell(interval: Interval, metric: Metric) -> str:
    """Format ``+0.10 (-0.02 to 0.22)`` or ``× 1.9 (1.1 to 3.2)``; bold where the interval excludes
    no difference.
    """
    if interval.n == 0:
        return "–"
    difference = interval.in_readers_unit(metric)
    mean = f"× {_number(difference.mean)}" if metric.kind == "ratio" else f"{difference.mean:+.2f}"
    if interval.n == 1:
        return mean
    cell = f"{mean} ({_number(difference.low)} to {_number(difference.high)})"
    return f"**{cell}**" if interval.excludes(0.0) else cell


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 or not math.isfinite(value) else f"{value:.3g}"


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


COLUMNS = 3
PANEL = (4.6, 3.1)
COLOURS = colormaps["tab10"]
SPARSE = 6  # curves of so few points get marks
WIDE = 10.0  # values above it are drawn on a logarithmic scale, where a curve allows that

Colour = tuple[float, float, float, float]


def draw_figure(path: Path, plan: FigurePlan, results: Sequence[RunResult]) -> bool:
    """Write the picture (PNG) to ``path``; return False when none of its variants has a result."""
    variants = [
        name for name in plan.variants if any(r.values and r.run.variant == name for r in results)
    ]
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
        _draw_end_values(
            panel, metric, {variant: colours[variant] for variant in variants}, SeedTable(results)
        )
    figure.suptitle(plan.title)
    handles = [Line2D([], [], color=colours[name], label=name, linewidth=2) for name in variants]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 4),
        fontsize=8,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # No software version or date inside: the same numbers give the same file.
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return True


def curve(results: Sequence[RunResult], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the iterations (n,) at which every run has ``name``, and its values (runs, n); None if
    there are none.
    """
    rows = [
        {row["iteration"]: row[name] for row in r.history if row.get(name) is not None}
        for r in results
    ]
    rows = [row for row in rows if row]
    shared = sorted(set.intersection(*(set(row) for row in rows))) if rows else []
    if not shared:
        return None
    return np.array(shared), np.array(
        [[row[step] for step in shared] for row in rows], dtype=np.float64
    )


def _draw_curve(
    panel: Axes, name: str, colours: dict[str, Colour], results: Sequence[RunResult]
) -> None:
    """Draw each variant's mean over seeds, with the range of the seeds as a shade."""
    for variant, colour in colours.items():
        points = curve([r for r in results if r.run.variant == variant], name)
        if points is not None:
            x, y = points
            marker = "o" if len(x) <= SPARSE else ""
            panel.plot(x, y.mean(axis=0), color=colour, linewidth=1.4, marker=marker, markersize=4)
            panel.fill_between(
                x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.12, linewidth=0
            )
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
        panel.plot(
            points, [height + 0.22] * len(points), "o", color=colour, markersize=3, alpha=0.6
        )
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


FIGURES = "figures"


def summarise(
    ablation: Ablation, runs: Iterable[AblationRun], folder: Path
) -> dict[str, list[ClaimVerdict]]:
    """Write ``results.csv``, ``verdicts.json``, ``table.md`` and ``figures/`` into ``folder``;
    return the verdicts.

    Args:
        ablation: The definition.
        runs: All runs, finished or not.
        folder: Where the files go.
    """
    results = read_results(runs)
    verdicts = judge_figures(ablation, SeedTable(results))
    links = {}
    for figure in ablation.figures:
        picture = folder / FIGURES / f"{figure.name}.png"
        if draw_figure(picture, figure, results):
            links[figure.name] = f"{FIGURES}/{picture.name}"
        else:
            picture.unlink(missing_ok=True)
    write_csv(folder / "results.csv", results)
    atomic_write_json(
        folder / "verdicts.json",
        {
            figure: [
                {
                    "claim": verdict.says,
                    "verdict": str(verdict.outcome),
                    "p": verdict.p,
                    "evidence": [
                        {"expected": item.expected, "measured": item.measured}
                        for item in verdict.evidence
                    ],
                }
                for verdict in group
            ]
            for figure, group in verdicts.items()
        },
    )
    atomic_write_text(folder / "table.md", "# Ablation\n\n" + write_page(ablation, results, links))
    return verdicts

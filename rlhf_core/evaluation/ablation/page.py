"""The results as Markdown: what each claim came to, every variant's level, every variant against the reference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rlhf_core.config.ablation import METRICS, Ablation, FigurePlan, Metric
from rlhf_core.errors import DataError
from rlhf_core.evaluation.ablation.intervals import Interval, SeedTable
from rlhf_core.evaluation.ablation.results import DONE, RunResult
from rlhf_core.evaluation.ablation.verdicts import ClaimOutcome, ClaimVerdict

BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"
LEVELS = ("gold_gain", "reward_gain", "gold_win_rate", "referee_win_rate", "kl", "length", "repetition", "missing_eos",
          "entropy", "perplexity_reference")  # fmt: skip
DIFFERENCES = ("gold", "reward_gain", "referee_win_rate", "kl", "length", "repetition", "missing_eos",
               "perplexity_reference")  # fmt: skip


def write_page(
    ablation: Ablation,
    results: Sequence[RunResult],
    verdicts: Mapping[str, Sequence[ClaimVerdict]],
    pictures: Mapping[str, str],
) -> str:
    """Return the whole page.

    Args:
        ablation: The definition.
        results: One per run.
        verdicts: Verdicts by figure.
        pictures: Links by figure, relative to where the page will be.
    """
    table = SeedTable(results)
    variants = [name for name in ablation.names if any(result.run.variant == name for result in results)]
    parts = [_head(results, verdicts)]
    parts += [_figure_section(figure, verdicts[figure.name], pictures.get(figure.name)) for figure in ablation.figures]
    parts += ["## Every variant", _level_table(ablation, variants, table)]
    parts += [f"## Against {ablation.reference}", _difference_table(ablation, variants, table)]
    if unfinished := [result.run for result in results if result.run.state != DONE]:
        lines = [f"- {run.variant}, seed {run.seed}: {run.state}. {run.message}".rstrip() for run in unfinished]
        parts += ["## Not finished", *lines]
    return "\n\n".join(parts) + "\n"


def insert(page: str, text: str, name: str) -> str:
    """Return ``page`` with ``text`` between its two markers.

    Raises:
        DataError: ``page``, which messages call ``name``, lacks the markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(f"{name} lacks the lines {BEGIN} and {END}; add them where the results are to stand")
    return f"{before}{BEGIN}\n{text}{END}{after}"


def _head(results: Sequence[RunResult], verdicts: Mapping[str, Sequence[ClaimVerdict]]) -> str:
    seeds = sorted({result.run.seed for result in results})
    done = sum(result.run.state == DONE for result in results)
    counts = Counter(verdict.outcome for group in verdicts.values() for verdict in group)
    by_outcome = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ClaimOutcome)
    return (
        f"{done} of {len(results)} runs, seeds {', '.join(map(str, seeds))}. Of {counts.total()} claims: {by_outcome}."
        "\n\n"
        "Values are means over seeds with 95 % intervals (Student's t); KL, length and perplexity are geometric means "
        "and compared as factors. Differences are paired: the same seed, hence the same SFT model, reward model, "
        "referee and held-out prompts."
    )


def _figure_section(figure: FigurePlan, verdicts: Sequence[ClaimVerdict], picture: str | None) -> str:
    lines = [f"## {figure.title}", ""]
    if picture:
        lines += [f"![{figure.title}]({picture})", ""]
    if not verdicts:
        return "\n".join(lines).rstrip()
    lines += ["| claim | verdict | expected | measured |", "|---|---|---|---|"]
    for verdict in verdicts:
        for row, item in enumerate(verdict.evidence):
            says, outcome = (verdict.says, f"**{verdict.outcome}**") if row == 0 else ("", "")
            lines.append(f"| {says} | {outcome} | {item.expected} | {item.measured} |")
    return "\n".join(lines)


def _level_table(ablation: Ablation, variants: Sequence[str], table: SeedTable) -> str:
    head = ["variant", "what it is", *(METRICS[name].label for name in LEVELS)]
    rows = [
        [
            name,
            ablation.variant(name).about,
            *(level_cell(table.level(name, metric), METRICS[metric]) for metric in LEVELS),
        ]
        for name in variants
    ]
    return _markdown_table(head, rows)


def _difference_table(ablation: Ablation, variants: Sequence[str], table: SeedTable) -> str:
    head = ["variant"]
    for name in DIFFERENCES:
        head.append(f"{METRICS[name].label}, {'factor' if METRICS[name].kind == 'ratio' else 'difference'}")
    rows = [
        [
            name,
            *(
                difference_cell(table.difference(name, ablation.reference, metric), METRICS[metric])
                for metric in DIFFERENCES
            ),
        ]
        for name in variants
        if name != ablation.reference
    ]
    return "Bold: the interval excludes no difference.\n\n" + _markdown_table(head, rows)


def level_cell(interval: Interval, metric: Metric) -> str:
    """Format ``0.31 ± 0.12``, or ``1.9 (1.1 to 3.2)`` for ratio metrics; no interval from fewer than two seeds."""
    if interval.n == 0:
        return "–"
    level = interval.in_readers_unit(metric)
    if interval.n == 1:
        return _number(level.mean)
    if metric.kind == "ratio":
        return f"{_number(level.mean)} ({_number(level.low)} to {_number(level.high)})"
    return f"{_number(level.mean)} ± {_number(level.high - level.mean)}"


def difference_cell(interval: Interval, metric: Metric) -> str:
    """Format ``+0.10 (-0.02 to 0.22)`` or ``× 1.9 (1.1 to 3.2)``; bold where the interval excludes no difference."""
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


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

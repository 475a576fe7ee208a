"""The results as Markdown: what each claim came to, every variant's level, every variant against the reference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rlhf_core.config.ablation.ablation import Ablation, FigurePlan
from rlhf_core.config.ablation.metrics import METRICS, Metric
from rlhf_core.errors import DataError
from rlhf_core.evaluation.ablation.intervals import Interval, Table
from rlhf_core.evaluation.ablation.results import DONE, Result
from rlhf_core.evaluation.ablation.verdicts import Outcome, Verdict

BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"
LEVELS = ("gold_gain", "reward_gain", "gold_win_rate", "referee_win_rate", "kl", "length", "repetition", "missing_eos",
          "entropy", "perplexity_reference")  # fmt: skip
DIFFERENCES = ("gold", "reward_gain", "referee_win_rate", "kl", "length", "repetition", "missing_eos",
               "perplexity_reference")  # fmt: skip


def write_page(
    ablation: Ablation,
    results: Sequence[Result],
    verdicts: Mapping[str, Sequence[Verdict]],
    pictures: Mapping[str, str],
) -> str:
    """The whole text. ``pictures`` maps names of figures to links, relative to where the text will lie."""
    table = Table(results)
    shown = [name for name in ablation.names if any(result.run.variant == name for result in results)]
    parts = [_head(results, verdicts)]
    parts += [_figure(figure, verdicts[figure.name], pictures.get(figure.name)) for figure in ablation.figures]
    parts += ["## Every variant", _levels(ablation, shown, table)]
    parts += [f"## Against {ablation.reference}", _differences(ablation, shown, table)]
    if unfinished := [result for result in results if result.run.state != DONE]:
        parts += ["## Not finished", *(_unfinished(result) for result in unfinished)]
    return "\n\n".join(parts) + "\n"


def insert(page: str, text: str, name: str) -> str:
    """``page`` with ``text`` between its two markers; ``DataError`` when ``page`` lacks them."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise DataError(f"{name} lacks the lines {BEGIN} and {END}; add them where the results are to stand")
    return f"{before}{BEGIN}\n{text}{END}{after}"


def _head(results: Sequence[Result], verdicts: Mapping[str, Sequence[Verdict]]) -> str:
    seeds = sorted({result.run.seed for result in results})
    done = sum(result.run.state == DONE for result in results)
    counts = Counter(verdict.outcome for group in verdicts.values() for verdict in group)
    total = sum(counts.values())
    spoken = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome)
    return (
        f"{done} of {len(results)} runs, seeds {', '.join(map(str, seeds))}. Of {total} claims: {spoken}.\n\n"
        "Values are means over seeds with 95 % intervals (Student's t); KL, length and perplexity are geometric means "
        "and compared as factors. Differences are paired: the same seed, hence the same SFT model, reward model, "
        "referee and held-out prompts."
    )


def _figure(figure: FigurePlan, verdicts: Sequence[Verdict], picture: str | None) -> str:
    lines = [f"## {figure.title}", ""]
    if picture:
        lines += [f"![{figure.title}]({picture})", ""]
    if not verdicts:
        return "\n".join(lines).rstrip()
    lines += ["| claim | verdict | expected | measured |", "|---|---|---|---|"]
    for verdict in verdicts:
        for place, item in enumerate(verdict.evidence):
            first = (verdict.says, f"**{verdict.outcome}**") if place == 0 else ("", "")
            lines.append(f"| {first[0]} | {first[1]} | {item.expected} | {item.measured} |")
    return "\n".join(lines)


def _levels(ablation: Ablation, shown: Sequence[str], table: Table) -> str:
    head = ["variant", "what it is", *(METRICS[name].label for name in LEVELS)]
    rows = [
        [name, ablation.variant(name).about, *(level(table.level(name, metric), METRICS[metric]) for metric in LEVELS)]
        for name in shown
    ]
    return _table(head, rows)


def _differences(ablation: Ablation, shown: Sequence[str], table: Table) -> str:
    head = ["variant", *(_difference_label(METRICS[name]) for name in DIFFERENCES)]
    rows = [
        [name, *(difference(table.difference(name, ablation.reference, m), METRICS[m]) for m in DIFFERENCES)]
        for name in shown
        if name != ablation.reference
    ]
    return "Bold: the interval excludes no difference.\n\n" + _table(head, rows)


def _difference_label(metric: Metric) -> str:
    return f"{metric.label}, {'factor' if metric.kind == 'ratio' else 'difference'}"


def level(interval: Interval, metric: Metric) -> str:
    """``0.31 ± 0.12``, or ``1.9 (1.1 to 3.2)`` for ratio metrics; no interval from fewer than two seeds."""
    if interval.n == 0:
        return "–"
    shown = interval.map(metric)
    if interval.n == 1:
        return _number(shown.mean)
    if metric.kind == "ratio":
        return f"{_number(shown.mean)} ({_number(shown.low)} to {_number(shown.high)})"
    return f"{_number(shown.mean)} ± {_number(shown.high - shown.mean)}"


def difference(interval: Interval, metric: Metric) -> str:
    """``+0.10 (-0.02 to 0.22)``, or ``× 1.9 (1.1 to 3.2)``; bold where the interval excludes no difference."""
    if interval.n == 0:
        return "–"
    shown = interval.map(metric)
    value = f"× {_number(shown.mean)}" if metric.kind == "ratio" else f"{shown.mean:+.2f}"
    if interval.n == 1:
        return value
    text = f"{value} ({_number(shown.low)} to {_number(shown.high)})"
    return f"**{text}**" if interval.excludes(0.0) else text


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 or not math.isfinite(value) else f"{value:.3g}"


def _unfinished(result: Result) -> str:
    return f"- {result.run.variant}, seed {result.run.seed}: {result.run.state}. {result.run.message}".rstrip()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

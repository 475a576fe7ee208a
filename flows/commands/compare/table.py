"""The results of runs as a table: a row for each metric, a column for each run, as many side by side as fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table

from flows.commands.compare.results import Estimate, GateStanding, RunResults
from flows.commands.display.formats import format_seconds
from rlhf_core.evaluation.judges.final import JUDGE

LABEL_WIDTH, RUN_WIDTH, GAP = 24, 12, 2
MISSING = "–"


def results_table(results: Sequence[RunResults], width: int) -> Group:
    """Return one table, or several below each other where ``width`` columns do not hold all runs."""
    at_once = max(1, (width - LABEL_WIDTH) // (RUN_WIDTH + GAP))
    return Group(*(_block(results[at : at + at_once]) for at in range(0, len(results), at_once)))


def _block(results: Sequence[RunResults]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column("", max_width=LABEL_WIDTH - GAP, style="dim")
    for result in results:
        table.add_column(result.workspace, max_width=RUN_WIDTH, overflow="fold")
    cells = [dict(_rows(result)) for result in results]
    for label in dict.fromkeys(label for column in cells for label in column):
        values = [column.get(label, MISSING) for column in cells]
        if any(value != MISSING for value in values):
            table.add_row(label, *values)
    return table


def _rows(result: RunResults) -> Iterator[tuple[str, str]]:
    yield "method", result.method
    by_other = "" if result.judge == JUDGE else f"\nby the {result.judge}"
    yield "win rate", _percent(result.win_rate) + by_other
    yield "at equal length", _percent(result.lc_win_rate)
    yield "win rate, gold", _percent(result.gold_win_rate)
    yield "gold score", _number(result.gold, 3)
    yield "reward", _number(result.reward, 3)
    bound = "≤ " if result.kl_is_bound else ""
    yield "KL, nats per reply", bound + _number(result.kl.value, 2) if result.kl is not None else MISSING
    for kind in ("preferred", "pretrain"):
        tax = result.perplexity_tax.get(kind)
        yield f"perplexity, {kind}", MISSING if tax is None else f"{tax:+.1%}"
    yield "length, tokens", _number(result.length, 1)
    yield "  of SFT", _number(result.sft_length, 1)
    yield from _cost_rows(result)
    yield "policy gate", _gate(result.gate)
    yield "registered", _version(result)


def _cost_rows(result: RunResults) -> Iterator[tuple[str, str]]:
    cost = result.cost
    yield "training time", MISSING if cost.total_seconds is None else format_seconds(cost.total_seconds)
    for stage in ("policy", "critic", "reward", "referee"):
        yield f"  of {stage}", format_seconds(cost.seconds[stage]) if stage in cost.seconds else MISSING
    yield "tokens sampled", _count(cost.sampled_tokens)
    yield "tokens trained on", _count(cost.trained_tokens)
    yield "tokens per reply", _number(result.sampled_tokens_per_reply, 0)


def _percent(interval: Estimate | None) -> str:
    if interval is None:
        return MISSING
    if interval.low95 is None or interval.high95 is None:
        return f"{interval.value:.1%}"
    return f"{interval.value:.1%}\n{interval.low95:.1%}–{interval.high95:.1%}"


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _gate(gate: GateStanding | None) -> str:
    if gate is None:
        return MISSING
    return f"{gate.decision}: {', '.join(gate.failed)}" if gate.failed else gate.decision


def _version(result: RunResults) -> str:
    entry = result.registered
    if entry is None:
        return MISSING
    return f"{entry.model} {entry.version}{' (ungated)' if entry.ungated else ''}"

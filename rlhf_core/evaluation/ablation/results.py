"""One row per variant and seed, read from what the stages of its workspace wrote."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.config.ablation.metrics import METRICS
from rlhf_core.data.schema import read_table
from rlhf_core.files import atomic_write_text, read_json
from rlhf_core.training.history import read_history

LAST = 5  # iterations that an end value of the history is averaged over: one rollout is noisy
EARLY = 10  # iterations that count as the start of training
DONE = "done"


@dataclass(frozen=True)
class Run:
    """One variant with one seed. ``state`` is ``done`` when the stages in ``workspace`` are up to date, else what kept
    them from it, with a ``message``."""

    variant: str
    seed: int
    workspace: Path
    state: str
    message: str = ""


@dataclass(frozen=True)
class Result:
    """A run with its end values (names of ``METRICS``; those that could not be measured are absent) and its history."""

    run: Run
    values: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()


def read_results(runs: Iterable[Run]) -> list[Result]:
    """The results of all runs; one that is not done has no values, whatever older files lie in its workspace."""
    return [_read(run) if run.state == DONE else Result(run) for run in runs]


def _read(run: Run) -> Result:
    evaluation = read_json(run.workspace / "metrics" / "evaluation.json")
    history = read_history(run.workspace / "history" / "ppo.jsonl")
    spread = _spreads(run.workspace / "samples" / "comparisons.parquet")
    values = end_values(evaluation, spread) | history_values(history)
    return Result(run, {name: value for name, value in values.items() if math.isfinite(value)}, history)


def _spreads(path: Path) -> dict[str, float]:
    """Standard deviation of SFT's scores by each judge, over the prompts."""
    table = read_table(path)
    scores = [f for f in table.schema if f.name.startswith("sft_") and pa.types.is_floating(f.type)]
    return {f.name.removeprefix("sft_"): float(np.std(table.column(f.name).to_numpy())) for f in scores}


def end_values(evaluation: Mapping[str, Any], spread: Mapping[str, float]) -> dict[str, float]:
    """End values of ``metrics/evaluation.json``. ``spread`` is the SD of SFT's scores by each judge: gains of learned
    judges are in that unit, since their own means nothing and differs from seed to seed. Unknown figures are NaN."""
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    comparison = evaluation.get("comparison", {})

    def gain(judge: str, unit: float = 1.0) -> float:
        return (policy.get(judge, math.nan) - sft.get(judge, math.nan)) / unit if unit else math.nan

    same = ("gold", "length", "repetition", "missing_eos", "distinct_2", "perplexity_reference")
    return {name: float(policy.get(name, math.nan)) for name in same} | {
        "kl": float(evaluation.get("kl", math.nan)),
        "gold_gain": gain("gold"),
        "gold_win_rate": float(comparison.get("gold", {}).get("win_rate", math.nan)),
        "referee_win_rate": float(comparison.get("referee", {}).get("win_rate", math.nan)),
        "reward_gain": gain("reward", spread.get("reward", math.nan)),
        "referee_gain": gain("referee", spread.get("referee", math.nan)),
    }


def history_values(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """End values of ``history/ppo.jsonl``: ``entropy`` and ``perplexity`` over the last 5 iterations, explained
    variance over the first 10, and the jitter of the reward (mean absolute change from one iteration to the next, in SD
    of the first rollout's rewards) in the first and the last third of the run."""
    third = max(len(history) // 3, 2)
    return {
        "entropy": _mean(history[-LAST:], "entropy"),
        "perplexity": _mean(history[-LAST:], "perplexity"),
        "explained_variance_early": _mean(history[:EARLY], "explained_variance"),
        "reward_jitter_early": _jitter(history, history[:third]),
        "reward_jitter_late": _jitter(history, history[-third:]),
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    values = _numbers(rows, name)
    return sum(values) / len(values) if values else math.nan


def _jitter(history: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> float:
    values, unit = _numbers(rows, "reward_mean"), _numbers(history[:1], "reward_std")
    if len(values) < 2 or not unit or unit[0] <= 0:
        return math.nan
    return float(np.abs(np.diff(values)).mean()) / unit[0]


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = [row.get(name) for row in rows]
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """``results.csv``: variant, seed, state, every metric (empty where unknown), message and workspace."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["variant", "seed", "state", *METRICS, "message", "workspace"])
    for result in results:
        run = result.run
        values = [repr(result.values[name]) if name in result.values else "" for name in METRICS]
        writer.writerow([run.variant, run.seed, run.state, *values, run.message, run.workspace])
    atomic_write_text(path, stream.getvalue())

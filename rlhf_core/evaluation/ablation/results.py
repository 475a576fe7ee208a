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

from rlhf_core.config.ablation import METRICS
from rlhf_core.data.schema import read_table
from rlhf_core.storage.files import atomic_write_text, read_json
from rlhf_core.training.history import read_history

LAST = 5  # iterations that an end value of the history is averaged over: one rollout is noisy
EARLY = 10  # iterations that count as the start of training
DONE = "done"

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AblationRun:
    """One variant with one seed.

    Attributes:
        state: ``done`` when the stages in ``workspace`` are up to date, otherwise what prevented it.
        message: Details of ``state``.
    """

    variant: str
    seed: int
    workspace: Path
    state: str
    message: str = ""


@dataclass(frozen=True)
class RunResult:
    """A run with its end values (names of ``METRICS``; those that could not be measured are absent) and its history."""

    run: AblationRun
    values: Mapping[str, float] = field(default_factory=dict)
    history: History = ()


def read_results(runs: Iterable[AblationRun]) -> list[RunResult]:
    """Read the results of all runs; one that is not done has no values, whatever older files are in its workspace."""
    return [_read(run) if run.state == DONE else RunResult(run) for run in runs]


def _read(run: AblationRun) -> RunResult:
    evaluation = read_json(run.workspace / "metrics" / "evaluation.json")
    history = read_history(run.workspace / "history" / "ppo.jsonl")
    comparisons = read_table(run.workspace / "samples" / "comparisons.parquet")
    sft_scores = [f.name for f in comparisons.schema if f.name.startswith("sft_") and pa.types.is_floating(f.type)]
    spread = {name.removeprefix("sft_"): float(np.std(comparisons.column(name).to_numpy())) for name in sft_scores}
    values = {**end_values(evaluation, spread), **history_values(history)}
    return RunResult(run, {name: value for name, value in values.items() if math.isfinite(value)}, history)


def end_values(evaluation: Mapping[str, Any], spread: Mapping[str, float]) -> dict[str, float]:
    """Return the end values that ``metrics/evaluation.json`` holds; unknown ones are NaN.

    Args:
        evaluation: The content of ``metrics/evaluation.json``.
        spread: Standard deviation of SFT's scores by each judge. Gains of learned judges are in that unit, since their
            own unit means nothing and differs from seed to seed.
    """
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    comparison = evaluation.get("comparison", {})

    def gain(judge: str, unit: float = 1.0) -> float:
        return (policy.get(judge, math.nan) - sft.get(judge, math.nan)) / unit if unit else math.nan

    same_name = ("gold", "length", "repetition", "missing_eos", "distinct_2", "perplexity_reference")
    return {
        **{name: float(policy.get(name, math.nan)) for name in same_name},
        "kl": float(evaluation.get("kl", math.nan)),
        "gold_gain": gain("gold"),
        "gold_win_rate": float(comparison.get("gold", {}).get("win_rate", math.nan)),
        "referee_win_rate": float(comparison.get("referee", {}).get("win_rate", math.nan)),
        "judge_win_rate": float(comparison.get("judge", {}).get("win_rate", math.nan)),
        "reward_gain": gain("reward", spread.get("reward", math.nan)),
        "referee_gain": gain("referee", spread.get("referee", math.nan)),
        "judge_gain": gain("judge", spread.get("judge", math.nan)),
    }


def history_values(history: History) -> dict[str, float]:
    """Return the end values that ``history/ppo.jsonl`` holds; unknown ones are NaN.

    ``entropy`` and ``perplexity`` are means over the last 5 iterations, explained variance over the first 10. The
    jitter of the reward is its mean absolute change from one iteration to the next, in standard deviations of the first
    rollout's rewards, in the first and in the last third of the run.
    """
    third = max(len(history) // 3, 2)
    return {
        "entropy": _mean(history[-LAST:], "entropy"),
        "perplexity": _mean(history[-LAST:], "perplexity"),
        "explained_variance_early": _mean(history[:EARLY], "explained_variance"),
        "reward_jitter_early": _jitter(history, history[:third]),
        "reward_jitter_late": _jitter(history, history[-third:]),
    }


def _mean(rows: History, name: str) -> float:
    values = _numbers(rows, name)
    return sum(values) / len(values) if values else math.nan


def _jitter(history: History, rows: History) -> float:
    values, unit = _numbers(rows, "reward_mean"), _numbers(history[:1], "reward_std")
    if len(values) < 2 or not unit or unit[0] <= 0:
        return math.nan
    return float(np.abs(np.diff(values)).mean()) / unit[0]


def _numbers(rows: History, name: str) -> list[float]:
    values = [row.get(name) for row in rows]
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def write_csv(path: Path, results: Sequence[RunResult]) -> None:
    """Write ``results.csv``: variant, seed, state, every metric (empty where unknown), message and workspace."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["variant", "seed", "state", *METRICS, "message", "workspace"])
    for result in results:
        run = result.run
        values = [repr(result.values[name]) if name in result.values else "" for name in METRICS]
        writer.writerow([run.variant, run.seed, run.state, *values, run.message, run.workspace])
    atomic_write_text(path, stream.getvalue())

"""What an ablation shows: its results, intervals of differences, and a verdict on each expectation.

The seed is the unit of replication: each brings its own world, SFT model, reward model, referee and
random numbers, and every variant of a seed is judged on the same held-out prompts. Prompts within a
seed are not independent trials of a training method, so they never narrow an interval here.

Whether an expectation holds is a one-sided t-test on D, the paired difference (for ratio metrics of
logarithms), over seeds: ``higher by m`` of D > m, ``lower by m`` of -D > m, ``same within w`` of D
> -w and of D < w, the worse of the
two. That it does not hold is the test of the opposite: D < m, -D < m, and D > w or D < -w.

A claim holds if all its expectations do (intersection-union), and does not hold if one of them does
not (Bonferroni over them). A figure asks several claims, so its p values are Holm's over them, for
either direction at :data:`LEVEL`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import stats

from benchmarks.ablation.definition import METRICS, Claim, Expectation, Metric
from flows.workspace import display_path
from rlhf_core.config import yaml_text
from rlhf_core.config.loading import PARAMS_FILE
from rlhf_core.data.schema import read_table
from rlhf_core.errors import DataError, first_line
from rlhf_core.storage.files import atomic_write_text, read_json
from rlhf_core.training.history import read_history
from rlhf_extras.run_comparison.compare import gate_standing, sampled_tokens

LAST = 5  # iterations that an end value of the history is averaged over: one rollout is noisy
EARLY = 10  # iterations that count as the start of training
DONE: Final = "done"
SHARED = "shared"  # takes the place of a variant

History = Sequence[Mapping[str, Any]]


RunState = Literal["done", "paused", "failed", "crashed", "skipped", "stopped"]


@dataclass(frozen=True)
class AblationRun:
    """How one variant with one seed, or what its seed's variants share (:data:`SHARED`), has run.

    Attributes:
        state: ``done`` when the stages in ``workspace`` are up to date, ``paused`` when a training
            stage stopped itself in good order, ``crashed`` when it may be tried again.
        message: Details of ``state``.
        seconds: The time it took.
        trained: Whether PPO ran in it.
    """

    variant: str
    seed: int
    workspace: Path
    state: RunState
    message: str = ""
    seconds: float = 0.0
    trained: bool = False

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{'shared stages' if self.variant == SHARED else self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class RunResult:
    """A run with its end values (names of ``METRICS``; those that could not be measured are absent)
    and its history.
    """

    run: AblationRun
    values: Mapping[str, float] = field(default_factory=dict)
    history: History = ()


def read_results(runs: Iterable[AblationRun]) -> list[RunResult]:
    """Read the results of all runs; one that is not done has no values, whatever older files are in
    its workspace.
    """
    return [_read(run) if run.state == DONE else RunResult(run) for run in runs]


def _read(run: AblationRun) -> RunResult:
    evaluation = read_json(run.workspace / "metrics" / "evaluation.json")
    history = read_history(run.workspace / "history" / "ppo.jsonl")
    comparisons = read_table(run.workspace / "samples" / "comparisons.parquet")
    sft_scores = [
        f.name
        for f in comparisons.schema
        if f.name.startswith("sft_") and pa.types.is_floating(f.type)
    ]
    spread = {
        name.removeprefix("sft_"): float(np.std(comparisons.column(name).to_numpy()))
        for name in sft_scores
    }
    cut = comparisons.filter(pc.invert(comparisons.column("policy_finished")))
    params = yaml_text.plain(yaml_text.read(run.workspace / PARAMS_FILE))
    sampled = sampled_tokens(history, params.get("policy", {}).get("method", "ppo"), params["ppo"])
    values = {
        **end_values(evaluation, spread),
        **history_values(history),
        "sampled_tokens": float(sampled or math.nan),
    }
    for judge in ("gold", "reward"):
        unit = 1.0 if judge == "gold" else spread.get(judge, math.nan)
        if cut.num_rows and f"policy_{judge}" in cut.column_names and unit:
            gain = np.mean(cut.column(f"policy_{judge}")) - np.mean(
                comparisons.column(f"sft_{judge}")
            )
            values[f"{judge}_gain_cut"] = float(gain / unit)
    gate = gate_standing(run.workspace)
    if gate.decision not in ("not judged", "outdated"):
        values["gate_missed"] = float(len(gate.failed))
    return RunResult(
        run, {name: value for name, value in values.items() if math.isfinite(value)}, history
    )


def end_values(evaluation: Mapping[str, Any], spread: Mapping[str, float]) -> dict[str, float]:
    """Return the end values that ``metrics/evaluation.json`` holds; unknown ones are NaN.

    Args:
        evaluation: The content of ``metrics/evaluation.json``.
        spread: Standard deviation of SFT's scores by each judge. Gains of learned judges are in
            that unit, since their own unit means nothing and differs from seed to seed.
    """
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    comparison, kl = evaluation.get("comparison", {}), float(evaluation.get("kl", math.nan))

    def over_sft(name: str) -> float:
        return float(policy.get(name, math.nan) / sft.get(name, math.nan))

    def gain(judge: str, unit: float = 1.0) -> float:
        return (policy.get(judge, math.nan) - sft.get(judge, math.nan)) / unit if unit else math.nan

    same_name = (
        "gold",
        "length",
        "repetition",
        "missing_eos",
        "distinct_2",
        "perplexity_reference",
    )
    return {
        **{name: float(policy.get(name, math.nan)) for name in same_name},
        "kl": kl,
        "gold_gain": gain("gold"),
        "gold_per_nat": gain("gold", kl),
        "gold_win_rate": float(comparison.get("gold", {}).get("win_rate", math.nan)),
        "referee_win_rate": float(comparison.get("referee", {}).get("win_rate", math.nan)),
        "judge_win_rate": float(comparison.get("judge", {}).get("win_rate", math.nan)),
        "judge_lc_win_rate": float(comparison.get("judge", {}).get("lc_win_rate", math.nan)),
        "perplexity_preferred": over_sft("perplexity_preferred"),
        "perplexity_pretrain": over_sft("perplexity_pretrain"),
        "reward_gain": gain("reward", spread.get("reward", math.nan)),
        "referee_gain": gain("referee", spread.get("referee", math.nan)),
        "judge_gain": gain("judge", spread.get("judge", math.nan)),
    }


def history_values(history: History) -> dict[str, float]:
    """Return the end values that ``history/ppo.jsonl`` holds; unknown ones are NaN.

    ``entropy`` and ``perplexity`` are means over the last 5 iterations, explained variance over the
    first 10. The jitter of the reward is its mean absolute change from one iteration to the next,
    in standard deviations of the first rollout's rewards, in the first and in the last third of the
    run.
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
    return [
        float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)
    ]


def write_csv(path: Path, results: Sequence[RunResult]) -> None:
    """Write ``results.csv``: variant, seed, state, every metric (empty where unknown), message and
    workspace.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["variant", "seed", "state", *METRICS, "message", "workspace"])
    for result in results:
        run = result.run
        values = [repr(result.values[name]) if name in result.values else "" for name in METRICS]
        writer.writerow(
            [run.variant, run.seed, run.state, *values, run.message, display_path(run.workspace)]
        )
    atomic_write_text(path, stream.getvalue())


def read_csv(path: Path) -> list[RunResult]:
    """Read what :func:`write_csv` wrote; the history of a run is not in it.

    Raises:
        DataError: The file lacks a column that names a run, or has a value that is no number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        return [
            RunResult(
                AblationRun(
                    row["variant"],
                    int(row["seed"]),
                    Path(row["workspace"]),
                    cast(RunState, row["state"]),
                    row["message"],
                ),
                {name: float(row[name]) for name in METRICS if row.get(name)},
            )
            for row in rows
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not the results.csv of an ablation: {first_line(error)}"
        ) from error


@dataclass(frozen=True)
class Interval:
    """Mean of ``n`` values and its 95 % bounds by Student's t with n - 1 degrees of freedom.

    The bounds are infinite for one value; all numbers are NaN for none.
    """

    mean: float
    low: float
    high: float
    n: int

    def excludes(self, value: float) -> bool:
        """Return whether ``value`` lies outside the bounds."""
        return self.low > value or self.high < value

    def in_readers_unit(self, metric: Metric) -> Interval:
        """Return the interval back from the scale of comparison: a difference of logarithms becomes
        a factor.
        """
        if metric.kind != "ratio":
            return self
        mean, low, high = (
            math.exp(v) if v < 700 else math.inf for v in (self.mean, self.low, self.high)
        )
        return Interval(mean, low, high, self.n)


def t_interval(values: Sequence[float]) -> Interval:
    """Compute Student's interval: ``mean ± t(.975, n - 1) · s / sqrt(n)``, s the sample standard
    deviation (n - 1).
    """
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    error = float(stats.sem(values))
    # Scipy's interval is NaN for a scale of zero.
    low, high = stats.t.interval(0.95, n - 1, loc=mean, scale=error) if error > 0 else (mean, mean)
    return Interval(mean, float(low), float(high), n)


def to_comparison_scale(metric: Metric, value: float) -> float:
    """Return the value on the scale on which it is compared: its logarithm for a ratio metric."""
    return math.log(max(value, metric.floor)) if metric.kind == "ratio" else value


class SeedTable:
    """End values by variant, seed and metric."""

    def __init__(self, results: Sequence[RunResult]) -> None:
        self._values: dict[str, dict[int, Mapping[str, float]]] = {}
        for result in results:
            if result.values:
                self._values.setdefault(result.run.variant, {})[result.run.seed] = result.values

    @property
    def variants(self) -> Collection[str]:
        """The variants that have results."""
        return self._values

    def by_seed(self, variant: str, metric: str) -> dict[int, float]:
        """Return values on the scale of comparison, by seed; seeds without the metric are
        absent.
        """
        rows = self._values.get(variant, {})
        return {
            seed: to_comparison_scale(METRICS[metric], row[metric])
            for seed, row in sorted(rows.items())
            if metric in row
        }

    def level(self, variant: str, metric: str) -> Interval:
        """Return the mean over seeds on the scale of comparison."""
        return t_interval(list(self.by_seed(variant, metric).values()))

    def difference(self, variant: str, other: str, metric: str) -> Interval:
        """Return the mean of ``variant - other`` over the seeds that both have, on the scale of
        comparison.
        """
        first, second = self.by_seed(variant, metric), self.by_seed(other, metric)
        return t_interval([first[seed] - second[seed] for seed in first if seed in second])


LEVEL = 0.025  # one-sided; an interval of 95 % leaves as much on either side


class ClaimOutcome(StrEnum):
    """What the data say about a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "cannot tell"


@dataclass(frozen=True)
class Evidence:
    """One expectation and what was measured.

    Attributes:
        expected: The expectation as a formula.
        interval: The measured interval in the reader's unit (factors for ratio metrics).
        holds: p value of its opposite, so that a small one says that it holds; 1 for fewer than two
            seeds.
        fails: p value of the expectation itself: a small one says that it does not hold.
    """

    expected: str
    interval: Interval
    holds: float = 1.0
    fails: float = 1.0

    @property
    def measured(self) -> str:
        """The interval as text."""
        if self.interval.n < 2:
            return "one seed: no interval" if self.interval.n else "not run"
        low, high = self.interval.low, self.interval.high
        return f"{self.interval.mean:.3g}, 95 % {low:.3g} to {high:.3g}, {self.interval.n} seeds"


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim (``says``), its outcome, its p value among its figure's claims, and the evidence for
    each expectation.
    """

    says: str
    outcome: ClaimOutcome
    p: float
    evidence: tuple[Evidence, ...]


def judge_claims(claims: Sequence[Claim], table: SeedTable) -> list[ClaimVerdict]:
    """Judge the claims of one figure together."""
    evidence = [
        tuple(examine(expectation, table) for expectation in claim.expects) for claim in claims
    ]
    holds = holm([max(item.holds for item in items) for items in evidence])
    fails = holm([min(1.0, len(items) * min(item.fails for item in items)) for items in evidence])
    return [
        ClaimVerdict(
            claim.says,
            ClaimOutcome.HOLDS
            if yes <= LEVEL
            else ClaimOutcome.FAILS
            if no <= LEVEL
            else ClaimOutcome.OPEN,
            min(yes, no),
            items,
        )
        for claim, yes, no, items in zip(claims, holds, fails, evidence, strict=True)
    ]


def holm(values: Sequence[float]) -> list[float]:
    """Holm's p values: the smallest times their number, the next times one less …, none below the
    one before it.
    """
    adjusted, largest = [1.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min(1.0, values[index] * (len(values) - rank)))
        adjusted[index] = largest
    return adjusted


def examine(expectation: Expectation, table: SeedTable) -> Evidence:
    """Compare one expectation with the data."""
    metric = METRICS[expectation.metric]
    if isinstance(expectation.than, str):
        difference = reported = table.difference(
            expectation.of, expectation.than, expectation.metric
        )
    else:
        reported = table.level(expectation.of, expectation.metric)
        than = to_comparison_scale(metric, expectation.than)
        difference = Interval(
            reported.mean - than, reported.low - than, reported.high - than, reported.n
        )
    expected, interval = formula(expectation, metric), reported.in_readers_unit(metric)
    if difference.n < 2:
        return Evidence(expected, interval)
    return Evidence(expected, interval, *p_values(expectation, difference, metric))


def p_values(expectation: Expectation, difference: Interval, metric: Metric) -> tuple[float, float]:
    """The p values of ``Evidence.holds`` and ``Evidence.fails``; ``difference`` is on the scale of
    comparison.
    """
    margin = _margin(expectation, metric)
    if expectation.relation == "same":
        inside = max(_p_above(difference, -margin), 1 - _p_above(difference, margin))
        beyond = min(_p_above(difference, margin), 1 - _p_above(difference, -margin))
        return inside, min(1.0, 2 * beyond)
    if expectation.relation == "lower":
        difference = Interval(-difference.mean, -difference.high, -difference.low, difference.n)
    above = _p_above(difference, margin)
    return above, 1 - above


def _p_above(interval: Interval, bound: float) -> float:
    """The p value of a true mean at or below ``bound``: small where the mean is surely above."""
    error = (interval.high - interval.low) / 2 / float(stats.t.ppf(0.975, interval.n - 1))
    if error == 0:
        return float(interval.mean <= bound)
    return float(stats.t.sf((interval.mean - bound) / error, interval.n - 1))


def formula(expectation: Expectation, metric: Metric) -> str:
    """Write an expectation as ``gold score: vanilla − ppo-max < 0``, ``KL: vanilla / ppo-max > 1``
    or ``KL: a < 6``.
    """
    if isinstance(expectation.than, str):
        subject, centre = (
            f"{expectation.of} {'/' if metric.kind == 'ratio' else '−'} {expectation.than}",
            0.0,
        )
    else:
        subject, centre = expectation.of, to_comparison_scale(metric, expectation.than)
    low, high = (centre + sign * _margin(expectation, metric) for sign in (-1, 1))
    if metric.kind == "ratio":
        low, high = math.exp(low), math.exp(high)
    bound = {
        "same": f"within {low:.3g} to {high:.3g}",
        "higher": f"> {high:.3g}",
        "lower": f"< {low:.3g}",
    }
    return f"{metric.label}: {subject} {bound[expectation.relation]}"


def _margin(expectation: Expectation, metric: Metric) -> float:
    """The margin of an expectation on the scale of comparison; that of a tolerance has no sign."""
    given = expectation.within if expectation.relation == "same" else expectation.by
    if given is None:
        return 0.0
    margin = math.log(given) if metric.kind == "ratio" else given
    return abs(margin) if expectation.relation == "same" else margin

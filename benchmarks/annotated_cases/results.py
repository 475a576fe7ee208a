"""What was measured of each arm and seed, kept as it comes; and the paired differences between arms."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.ablation.verdicts import Interval, t_interval
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines

ARMS = ("none", "random", "bad")
CONTRASTS = (("bad", "random"), ("bad", "none"), ("random", "none"))
COMPARED = ("gold_accuracy", "gold_accuracy_bad_cases", "test_accuracy", "policy_gold", "policy_win_rate")
DESCRIBED = ("annotated", "trained_on", "labels_as_gold")


@dataclass(frozen=True)
class ArmResult:
    """What was measured of one arm of one seed.

    ``metrics`` has those of :data:`COMPARED` that could be measured, and of the arms with annotations how many pairs
    were annotated, how many of them the reward model trained on, and the share of labels that gold agrees with.
    """

    seed: int
    arm: str
    metrics: dict[str, float]


def load_results(file: Path) -> list[ArmResult]:
    """Read the results so far; none if there is no such file."""
    if not file.is_file():
        return []
    return [ArmResult(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def add_result(file: Path, result: ArmResult) -> None:
    """Write ``result`` beside the others in ``file``, in place of an earlier one of the same arm and seed."""
    others = [old for old in load_results(file) if (old.seed, old.arm) != (result.seed, result.arm)]
    atomic_write_lines(file, [asdict(one) for one in [*others, result]])


def paired_difference(results: Sequence[ArmResult], metric: str, arm: str, other: str) -> Interval:
    """Return mean and 95 % t interval of ``arm - other`` over the seeds of which both have ``metric``."""
    first, second = (
        {result.seed: result.metrics[metric] for result in results if result.arm == name and metric in result.metrics}
        for name in (arm, other)
    )
    return t_interval([first[seed] - second[seed] for seed in sorted(first) if seed in second])


def write_summary(file: Path, results: Sequence[ArmResult]) -> None:
    """Write all results and differences as JSON; bounds that are not finite, as of one seed, are null."""
    differences = []
    for metric in COMPARED:
        for arm, other in CONTRASTS:
            interval = paired_difference(results, metric, arm, other)
            if interval.n:
                numbers: dict[str, Any] = {
                    name: value if math.isfinite(value) else None for name, value in asdict(interval).items()
                }
                differences.append({"metric": metric, "arm": arm, "other": other, **numbers})
    atomic_write_json(file, {"results": [asdict(result) for result in results], "differences": differences})


def result_table(results: Sequence[ArmResult]) -> Table:
    """Return a row for each seed and arm."""
    columns = [name for name in (*DESCRIBED, *COMPARED) if any(name in result.metrics for result in results)]
    table = Table("seed", "arm", *(name.replace("_", " ") for name in columns))
    for result in sorted(results, key=lambda one: (one.seed, ARMS.index(one.arm))):
        cells = [_number(result.metrics[name]) if name in result.metrics else "" for name in columns]
        table.add_row(str(result.seed), result.arm, *cells)
    return table


def difference_table(results: Sequence[ArmResult]) -> Table:
    """Return a row for each metric and two arms: mean difference, 95 % interval, number of seeds."""
    table = Table("metric", "difference", "mean", "95 %, paired over seeds", "n")
    for metric in COMPARED:
        for arm, other in CONTRASTS:
            interval = paired_difference(results, metric, arm, other)
            if interval.n:
                bounds = f"{interval.low:+.4f} to {interval.high:+.4f}" if interval.n > 1 else "needs two seeds"
                label = metric.replace("_", " ")
                table.add_row(label, f"{arm} - {other}", f"{interval.mean:+.4f}", bounds, str(interval.n))
    return table


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and value > 1 else f"{value:.4f}"

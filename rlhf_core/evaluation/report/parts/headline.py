"""The headline of a run: few metrics in one flat table, and its training curves as CSV files, for comparing runs."""

from __future__ import annotations

import csv
import io
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.storage.files import atomic_write_text, flatten

# Name in the headline, and where the metric is: the stage's file, then the path in it; of several the first there is.
# `dvc metrics show` prints them side by side, which must fit 120 columns.
HEADLINE = {
    "sft_perplexity": ("sft.perplexity",),
    "reward_accuracy": ("reward.accuracy",),
    "win_rate": ("evaluation.comparison.judge.win_rate", "evaluation.comparison.referee.win_rate"),
    "win_rate_low95": ("evaluation.comparison.judge.win_rate_low95", "evaluation.comparison.referee.win_rate_low95"),
    "gold_win_rate": ("evaluation.comparison.gold.win_rate",),
    "kl": ("evaluation.kl",),
    "length": ("evaluation.policy.length",),
}
DECIMALS = 4
# Columns of each curve's file, the first of which counts training; dvc.yaml plots them.
CURVES = {
    "sft": ("step", "loss"),
    "reward": ("step", "accuracy", "loss"),
    "referee": ("step", "accuracy", "loss"),
    "judge": ("step", "accuracy", "loss"),
    "critic": ("iteration", "explained_variance"),
    "ppo": ("iteration", "reward_mean", "kl", "length", "repetition"),
}


def headline_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Select the headline from the content of ``metrics/NAME.json`` by name, rounded; what is missing is left out.

    The win rate is the judge's against SFT, that of the referee where an earlier version trained no judge; the
    synthetic world alone has a gold judge.
    """
    flat = flatten(metrics)
    values = {name: next((flat[path] for path in paths if path in flat), None) for name, paths in HEADLINE.items()}
    return {
        name: round(float(value), DECIMALS)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def write_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> None:
    """Write ``NAME.csv`` for each history with rows that have all columns of its curves; other files are removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, columns in CURVES.items():
        rows = [[row[column] for column in columns] for row in histories.get(name, ()) if set(columns) <= row.keys()]
        if rows:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([columns, *rows])
            atomic_write_text(folder / f"{name}.csv", text.getvalue())

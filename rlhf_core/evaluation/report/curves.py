"""Which curves the report draws from which history, as data. Names that a history lacks are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rlhf_core.evaluation.report.charts import Band, Point, Series, line_chart

STEP_NAMES = ("iteration", "step", "rollout")


@dataclass(frozen=True)
class Plan:
    """A chart: ``lines`` and ``bands`` map labels to names in the history; several names are tried in turn."""

    history: str
    title: str
    lines: Mapping[str, tuple[str, ...]]
    note: str = ""
    bands: Mapping[str, tuple[str, str]] | None = None


@dataclass(frozen=True)
class Chart:
    """A drawn chart with its title and what to look for."""

    title: str
    svg: Markup
    note: str


PLANS = (
    Plan("sft", "Loss", {"training": ("loss",), "validation": ("validation_loss",)}),
    Plan("sft", "Perplexity", {"held-out demonstrations": ("validation_perplexity",)}),
    Plan("sft", "Learning rate", {"learning rate": ("lr",)}),
    Plan("reward", "Loss", {"ranking": ("ranking_loss",), "ranking, validation": ("validation_loss",),
                             "imitation": ("imitation_loss",)}),
    Plan("reward", "Accuracy", {"training": ("accuracy",), "validation": ("validation_accuracy",)},
         "Accuracy alone is not enough: see margins and calibration below."),
    Plan("reward", "Margin", {"training": ("margin",), "validation": ("validation_margin",)}),
    Plan("referee", "Accuracy", {"training": ("accuracy",), "validation": ("validation_accuracy",)}),
    Plan("critic", "Value loss", {"value loss": ("value_loss", "loss")}),
    Plan("critic", "Explained variance", {"explained variance": ("explained_variance",)}, "PPO starts once high."),
    Plan("ppo", "Reward (raw score)", {"mean": ("reward_mean",), "median": ("reward_p50",)},
         "The whole distribution: a tail that opens below the median is an early sign of collapse.",
         {"5–95 %": ("reward_p05", "reward_p95"), "25–75 %": ("reward_p25", "reward_p75")}),
    Plan("ppo", "KL to the reference", {"KL, nats per sequence": ("kl",)},
         "What separates a healthy run from a collapsed one first."),
    Plan("ppo", "Win rate against SFT by the referee",
         {"win rate": ("win_rate",)},
         "On fixed validation prompts; it chooses the checkpoint.",
         {"95 %": ("win_rate_low95", "win_rate_high95")}),
    Plan("ppo", "Reply length", {"mean tokens": ("length",), "95th percentile": ("length_p95",)}),
    Plan("ppo", "Repetition and missing end", {"repeated trigrams": ("repetition",), "missing end": ("missing_eos",)}),
    Plan("ppo", "Perplexity of the replies", {"under the reference": ("perplexity_reference",),
                                              "under the policy": ("perplexity",)}),
    Plan("ppo", "Variety", {"distinct bigrams": ("distinct_2",),
                            "distinct first sentences": ("distinct_first_sentences",), "refusals": ("refusals",)}),
    Plan("ppo", "Explained variance", {"explained variance": ("explained_variance",)}),
    Plan("ppo", "Value loss", {"value loss": ("value_loss",)}),
    Plan("ppo", "Entropy", {"nats per token": ("entropy",)}, "Alone it does not tell health from collapse."),
    Plan("ppo", "Gradient norms", {"policy": ("policy_grad_norm",), "critic": ("critic_grad_norm",)}),
    Plan("ppo", "Clipped share", {"policy": ("clip_fraction",), "value": ("value_clip_fraction",)}),
    Plan("ppo", "Reward's correlation", {"with length": ("reward_length_correlation",),
                                         "with the referee": ("reward_referee_correlation",)}),
    Plan("ppo", "KL coefficient", {"β": ("kl_coefficient",), "β per SD of treated reward": ("kl_pull",)}),
)  # fmt: skip


def draw(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Chart]]:
    """Charts by history, in the order of :data:`PLANS`; a chart without any of its lines is left out."""
    found: dict[str, list[Chart]] = {}
    for plan in PLANS:
        rows = histories.get(plan.history, [])
        series = [Series(label, line) for label, names in plan.lines.items() if (line := _first(rows, names))]
        if not series:
            continue
        bands = [
            Band(label, points(rows, low), points(rows, high))
            for label, (low, high) in (plan.bands or {}).items()
            if points(rows, low) and points(rows, high)
        ]
        label = next((name for name in STEP_NAMES if any(name in row for row in rows)), "row")
        svg = line_chart(series, bands, label, f"{plan.history}: {plan.title}")
        found.setdefault(plan.history, []).append(Chart(plan.title, svg, plan.note))
    return found


def points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """(step, value) of the rows that have ``name`` as a number."""
    found = []
    for number, row in enumerate(rows, start=1):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            step = next((row[key] for key in STEP_NAMES if isinstance(row.get(key), int | float)), number)
            found.append((float(step), float(value)))
    return found


def _first(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Point]:
    return next((found for name in names if (found := points(rows, name))), [])

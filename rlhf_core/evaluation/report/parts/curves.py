"""Which curves the report draws from which history, as data; names that a history lacks are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rlhf_core.evaluation.report.charts import Band, Point, Series, line_chart

STEP_NAMES = ("iteration", "step", "rollout")


@dataclass(frozen=True)
class ChartSpec:
    """What a chart shows.

    Attributes:
        history: The stage whose history it is drawn from.
        title: Its heading.
        lines: Names in the history by label; of several names the first that the history has.
        note: What to look for.
        bands: (lower edge, upper edge), names in the history, by label.
    """

    history: str
    title: str
    lines: Mapping[str, tuple[str, ...]]
    note: str = ""
    bands: Mapping[str, tuple[str, str]] | None = None


@dataclass(frozen=True)
class Chart:
    """A drawn chart with its title and a note on what to look for."""

    title: str
    svg: Markup
    note: str


CHARTS = (
    ChartSpec("sft", "Loss", {"training": ("loss",), "validation": ("validation_loss",)}),
    ChartSpec("sft", "Perplexity", {"held-out demonstrations": ("validation_perplexity",)}),
    ChartSpec("sft", "Learning rate", {"learning rate": ("lr",)}),
    ChartSpec(
        "reward",
        "Loss",
        {"ranking": ("ranking_loss",), "ranking, validation": ("validation_loss",), "imitation": ("imitation_loss",)},
    ),
    ChartSpec(
        "reward",
        "Accuracy",
        {"training": ("accuracy",), "validation": ("validation_accuracy",)},
        "Accuracy alone is not enough: see margins and calibration below.",
    ),
    ChartSpec("reward", "Margin", {"training": ("margin",), "validation": ("validation_margin",)}),
    ChartSpec("referee", "Accuracy", {"training": ("accuracy",), "validation": ("validation_accuracy",)}),
    ChartSpec("judge", "Accuracy", {"training": ("accuracy",), "validation": ("validation_accuracy",)}),
    ChartSpec("critic", "Value loss", {"value loss": ("value_loss", "loss")}),
    ChartSpec(
        "critic", "Explained variance", {"explained variance": ("explained_variance",)}, "PPO starts once it is high."
    ),
    ChartSpec(
        "ppo",
        "Reward (raw score)",
        {"mean": ("reward_mean",), "median": ("reward_p50",)},
        "The whole distribution: a tail that opens below the median is an early sign of collapse.",
        {"5–95 %": ("reward_p05", "reward_p95"), "25–75 %": ("reward_p25", "reward_p75")},
    ),
    ChartSpec(
        "ppo",
        "KL to the reference",
        {"KL, nats per sequence": ("kl",)},
        "The first signal that separates a healthy run from a collapsed one.",
    ),
    ChartSpec(
        "ppo",
        "Win rate against SFT by the referee",
        {"win rate": ("win_rate",)},
        "On fixed validation prompts; it selects the checkpoint.",
        {"95 %": ("win_rate_low95", "win_rate_high95")},
    ),
    ChartSpec("ppo", "Loss", {"training": ("loss",), "validation": ("validation_loss",)}),
    ChartSpec(
        "ppo",
        "Accuracy of the implicit reward",
        {"training": ("accuracy",), "validation": ("validation_accuracy",)},
        "Share of pairs whose chosen reply became likelier than the rejected one, beside SFT.",
    ),
    ChartSpec(
        "ppo",
        "Implicit reward of held-out replies",
        {
            "chosen": ("validation_implicit_reward_chosen",),
            "rejected": ("validation_implicit_reward_rejected",),
        },
        "Both far below zero: the policy moves away from the replies of the pairs altogether.",
    ),
    ChartSpec("ppo", "Reply length", {"mean tokens": ("length",), "95th percentile": ("length_p95",)}),
    ChartSpec(
        "ppo", "Repetition and missing end", {"repeated trigrams": ("repetition",), "missing end": ("missing_eos",)}
    ),
    ChartSpec(
        "ppo",
        "Perplexity of the replies",
        {"under the reference": ("perplexity_reference",), "under the policy": ("perplexity",)},
    ),
    ChartSpec(
        "ppo",
        "Variety",
        {
            "distinct bigrams": ("distinct_2",),
            "distinct first sentences": ("distinct_first_sentences",),
            "refusals": ("refusals",),
        },
    ),
    ChartSpec("ppo", "Explained variance", {"explained variance": ("explained_variance",)}),
    ChartSpec("ppo", "Value loss", {"value loss": ("value_loss",)}),
    ChartSpec(
        "ppo",
        "Rewards of the replies to one prompt",
        {"standard deviation": ("group_reward_std",), "prompts with equal rewards": ("equal_reward_groups",)},
        "An update without a critic learns from their difference alone.",
    ),
    ChartSpec("ppo", "Entropy", {"nats per token": ("entropy",)}, "Alone it does not tell health from collapse."),
    ChartSpec("ppo", "Gradient norms", {"policy": ("policy_grad_norm",), "critic": ("critic_grad_norm",)}),
    ChartSpec("ppo", "Clipped share", {"policy": ("clip_fraction",), "value": ("value_clip_fraction",)}),
    ChartSpec(
        "ppo",
        "Reward's correlation",
        {"with length": ("reward_length_correlation",), "with the referee": ("reward_referee_correlation",)},
    ),
    ChartSpec("ppo", "KL coefficient", {"β": ("kl_coefficient",), "β per SD of treated reward": ("kl_pull",)}),
)


def draw_charts(
    histories: Mapping[str, Sequence[Mapping[str, Any]]], findings: Sequence[float] = ()
) -> dict[str, list[Chart]]:
    """Draw charts by history, in the order of :data:`CHARTS`; a chart without any of its lines is left out.

    Args:
        histories: Rows of ``history/NAME.jsonl`` by stage.
        findings: Iterations of PPO with a health finding, which its charts mark.
    """
    charts: dict[str, list[Chart]] = {}
    for spec in CHARTS:
        rows = histories.get(spec.history, [])
        # Of several names the first that the history has.
        lines = {
            label: next((line for name in names if (line := points(rows, name))), [])
            for label, names in spec.lines.items()
        }
        series = [Series(label, line) for label, line in lines.items() if line]
        if not series:
            continue
        bands = [
            Band(label, points(rows, low), points(rows, high))
            for label, (low, high) in (spec.bands or {}).items()
            if points(rows, low) and points(rows, high)
        ]
        x_label = next((name for name in STEP_NAMES if any(name in row for row in rows)), "row")
        marks = findings if spec.history == "ppo" else ()
        svg = line_chart(series, bands, x_label, f"{spec.history}: {spec.title}", marks)
        charts.setdefault(spec.history, []).append(Chart(spec.title, svg, spec.note))
    return charts


def points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return (step, value) of the rows that have ``name`` as a finite number."""
    line = []
    for number, row in enumerate(rows, start=1):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            step = next((row[key] for key in STEP_NAMES if isinstance(row.get(key), int | float)), number)
            line.append((float(step), float(value)))
    return line

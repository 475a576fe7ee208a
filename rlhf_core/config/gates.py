"""Gates as data: a metric, a bound, and why the bound is there."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.model import StageConfig, Strict

MULTIPLE_CHOICE = "multiple_choice"
LOSSES = "losses"
CHECKER = "checker"  # the reward functions as a judge of replies to held-out prompts, where there are no pairs
# Kinds of counterfactual pairs on which a reward model is tried: of any data, and of the synthetic
# world.
PROBES = (
    "other_question",
    "values_swapped",
    "cut_in_half",
    "sentence_repeated",
    "pleasantry_appended",
    "sentences_shuffled",
)
WORLD_PROBES = ("world_fact", "world_story", "world_howto", "world_refusal")
# What begins the names of metrics that only the judge has.
OF_THE_JUDGE = ("judge.", "agreement.judge_")
ABSENT = "absent"  # among metrics, why some of them are missing, by name


class Condition(Strict):
    """One statement about a metric that a gate requires. Exactly one of the bounds is set.

    Attributes:
        metric: Dotted path into the metrics, such as `comparison.judge.win_rate_low95`.
        at_least: Lower bound.
        at_most: Upper bound.
        at_most_of: Bounds the metric by another: `max(factor * other, other + slack)`.
        at_least_of: Likewise from below: `min(factor * other, other - slack)`.
        worse_by_less_than: How much worse than SFT the policy may be: `metric` is then a name below
            `losses`, such as `repetition`, of which the one-sided upper 95 % bound, over questions,
            must be below the margin.
        where_at_least: With `worse_by_less_than`: read only where SFT's own value is at least this.
        factor: Multiplies the other metric.
        slack: Added to the other metric.
        why: Why the bound is there, for report and messages.
    """

    metric: str
    at_least: float | None = Field(default=None, strict=False)
    at_most: float | None = Field(default=None, strict=False)
    at_most_of: str | None = None
    at_least_of: str | None = None
    worse_by_less_than: float | None = Field(default=None, gt=0, strict=False)
    where_at_least: float | None = Field(default=None, strict=False)
    factor: float = Field(default=1.0, strict=False)
    slack: float = Field(default=0.0, strict=False)
    why: str

    @model_validator(mode="after")
    def _one_bound(self) -> Condition:
        names = ("at_least", "at_most", "at_most_of", "at_least_of", "worse_by_less_than")
        if sum(getattr(self, name) is not None for name in names) != 1:
            raise ValueError(f"give exactly one of {', '.join(names)}")
        if self.where_at_least is not None and self.worse_by_less_than is None:
            raise ValueError("where_at_least goes with worse_by_less_than")
        return self

    @property
    def metrics(self) -> list[str]:
        """The metrics that the condition reads."""
        metric = self.metric if self.worse_by_less_than is None else f"{LOSSES}.{self.metric}"
        return [name for name in (metric, self.at_most_of, self.at_least_of) if name is not None]

    @property
    def reads_judge(self) -> bool:
        """Whether one of its metrics is the judge's, or about how far others agree with it."""
        return any(metric.startswith(OF_THE_JUDGE) for metric in self.metrics)

    @property
    def parts(self) -> set[str]:
        """All names between the dots of the metrics that the condition reads."""
        parts: set[str] = set()
        for metric in self.metrics:
            parts.update(metric.split("."))
        return parts

    @property
    def is_of_the_world(self) -> bool:
        """Whether only the synthetic world, whose truth is known, has one of its metrics."""
        return "gold" in self.parts or any(kind in WORLD_PROBES for kind in self.probes)

    @property
    def probes(self) -> list[str]:
        """The kinds of counterfactual pairs that the condition names, known or not."""
        names = [metric.partition("probes.")[2] for metric in self.metrics]
        return [re.sub(r"_(low95|high95|pairs)$", "", name) for name in names if name]


PERPLEXITY_HOLDS = Condition(
    metric="perplexity",
    at_most_of="perplexity_before",
    why="a model that got worse at held-out demonstrations was wrecked, mostly by its learning rate",
)


class GatesConfig(StageConfig):
    """Conditions by gate.

    A gate without conditions vouches for nothing, so it fails; an empty list is refused in
    ``enforce`` mode. The conditions of the data gate are the limits of section ``validate`` and the
    expectations of whole tables.

    Attributes:
        mode: `report` records decisions without enforcing them.
        sft: Conditions on the SFT model.
        reward: Conditions on reward model, referee and judge; null where `collect.pairs` is false.
            Those on the judge `gate-policy` decides: PPO does not wait for it.
        policy: Conditions on the policy.
        multiple_choice_margin: Where the evaluation asks multiple-choice questions, the policy must
            not be inferior to SFT by more than this, by the lower 95 % bound of the difference of
            accuracies; a condition of its own on multiple choice, or null, takes the place of that.
    """

    mode: Literal["enforce", "report"] = "enforce"
    sft: tuple[Condition, ...] = Field(default=(PERPLEXITY_HOLDS,), strict=False)
    reward: tuple[Condition, ...] | None = Field(default=(), strict=False)
    policy: tuple[Condition, ...] = Field(default=(), strict=False)
    multiple_choice_margin: Annotated[float, Field(gt=0, le=1, strict=False)] | None = 0.05

    @property
    def reward_conditions(self) -> tuple[Condition, ...]:
        """The conditions of the reward gate: those that do not read the judge."""
        return tuple(asked for asked in self.reward or () if not asked.reads_judge)

    def policy_conditions(self, evaluated: Collection[str]) -> tuple[Condition, ...]:
        """Return the conditions of the policy gate, and of its judge.

        Args:
            evaluated: The top-level names in the metrics of the evaluation.
        """
        of_judge = tuple(asked for asked in self.reward or () if asked.reads_judge)
        conditions = (*of_judge, *self.policy)
        margin = self.multiple_choice_margin
        own = any(MULTIPLE_CHOICE in condition.parts for condition in self.policy)
        if margin is None or own or MULTIPLE_CHOICE not in evaluated:
            return conditions
        no_knowledge_lost = Condition(
            metric=f"{MULTIPLE_CHOICE}.difference_low95",
            at_least=-margin,
            why="no knowledge lost: not inferior to SFT at multiple choice (gates.multiple_choice_margin)",
        )
        return (*conditions, no_knowledge_lost)

    @model_validator(mode="after")
    def _no_empty_gate(self) -> GatesConfig:
        if self.mode != "enforce":
            return self
        for name in ("sft", "reward", "policy"):
            if name in self.model_fields_set and getattr(self, name) == ():
                raise ValueError(
                    f"gates.{name} is empty, and a gate without conditions vouches for nothing: give it at least one "
                    "condition, or set gates.mode: report, which registers ungated versions only"
                )
        return self

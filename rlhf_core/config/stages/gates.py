"""Gates as data: a metric, a bound, and why the bound is there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.model import StageConfig, Strict

MULTIPLE_CHOICE = "multiple_choice"


class Condition(Strict):
    """``metric`` is a dotted path into the metrics, such as ``comparison.judge.win_rate_low95``.

    Exactly one of the bounds is set. ``at_most_of`` bounds a metric by another: ``max(factor * other, other + slack)``;
    ``at_least_of`` likewise from below: ``min(factor * other, other - slack)``.
    """

    metric: str
    at_least: float | None = Field(default=None, strict=False)
    at_most: float | None = Field(default=None, strict=False)
    at_most_of: str | None = None
    at_least_of: str | None = None
    factor: float = Field(default=1.0, strict=False)
    slack: float = Field(default=0.0, strict=False)
    why: str

    @model_validator(mode="after")
    def _one_bound(self) -> Condition:
        given = [b for b in (self.at_least, self.at_most, self.at_most_of, self.at_least_of) if b is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of at_least, at_most, at_most_of, at_least_of")
        return self

    @property
    def metrics(self) -> list[str]:
        """The metrics that the condition reads."""
        return [name for name in (self.metric, self.at_most_of, self.at_least_of) if name is not None]


PERPLEXITY_HOLDS = Condition(
    metric="perplexity",
    at_most_of="perplexity_before",
    why="a model that got worse at held-out demonstrations was wrecked, mostly by its learning rate",
)


class GatesConfig(StageConfig):
    """Conditions by gate. ``mode: report`` records the decision without enforcing it.

    Where the evaluation asks multiple-choice questions, the policy gate also requires that the policy is not inferior
    to SFT by more than ``multiple_choice_margin``, by the lower 95 % bound of the difference of accuracies; a condition
    of its own on multiple choice, or ``null``, takes the place of that.

    A gate without conditions vouches for nothing, so it fails; an empty list is refused in ``enforce`` mode.
    """

    mode: Literal["enforce", "report"] = "enforce"
    data: tuple[Condition, ...] = Field(default=(), strict=False)
    sft: tuple[Condition, ...] = Field(default=(PERPLEXITY_HOLDS,), strict=False)
    reward: tuple[Condition, ...] = Field(default=(), strict=False)
    policy: tuple[Condition, ...] = Field(default=(), strict=False)
    multiple_choice_margin: Annotated[float, Field(gt=0, le=1, strict=False)] | None = 0.05

    def policy_conditions(self, evaluated: Collection[str]) -> tuple[Condition, ...]:
        """The conditions of the policy gate on an evaluation with the metrics ``evaluated``, by their first name."""
        margin = self.multiple_choice_margin
        own = any(MULTIPLE_CHOICE in metric.split(".") for c in self.policy for metric in c.metrics)
        if margin is None or own or MULTIPLE_CHOICE not in evaluated:
            return self.policy
        no_knowledge_lost = Condition(
            metric=f"{MULTIPLE_CHOICE}.difference_low95",
            at_least=-margin,
            why="no knowledge lost: not inferior to SFT at multiple choice (gates.multiple_choice_margin)",
        )
        return (*self.policy, no_knowledge_lost)

    @model_validator(mode="after")
    def _no_empty_gate(self) -> GatesConfig:
        for name in ("sft", "reward", "policy"):
            if self.mode == "enforce" and name in self.model_fields_set and not getattr(self, name):
                raise ValueError(
                    f"gates.{name} is empty, and a gate without conditions vouches for nothing: give it at least one "
                    "condition, or set gates.mode: report, which registers ungated versions only"
                )
        return self

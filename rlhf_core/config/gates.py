"""Gates as data: a metric, a bound, and why the bound is there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.model import StageConfig, Strict


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

    A gate without conditions vouches for nothing, so it fails; an empty list is refused in ``enforce`` mode.
    """

    mode: Literal["enforce", "report"] = "enforce"
    data: tuple[Condition, ...] = Field(default=(), strict=False)
    sft: tuple[Condition, ...] = Field(default=(PERPLEXITY_HOLDS,), strict=False)
    reward: tuple[Condition, ...] = Field(default=(), strict=False)
    policy: tuple[Condition, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _no_empty_gate(self) -> GatesConfig:
        for name in ("sft", "reward", "policy"):
            if self.mode == "enforce" and name in self.model_fields_set and not getattr(self, name):
                raise ValueError(
                    f"gates.{name} is empty, and a gate without conditions vouches for nothing: give it at least one "
                    "condition, or set gates.mode: report, which registers ungated versions only"
                )
        return self

"""What a user may change of the health rules (``ppo.health``): the shape only, the rules are in ``default_rules``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from rlhf_core.config.model import Strict


class Adjustment(Strict):
    """Factors that a rollback applies: on the KL coefficient, and on the learning rates of policy and critic."""

    kl_coefficient: PositiveFloat = 1.0
    lr: PositiveFloat = 1.0

    def factors(self) -> tuple[tuple[str, float], ...]:
        """Name and factor of all that changes."""
        return tuple((name, factor) for name, factor in self if factor != 1.0)


class RuleChange(Strict):
    """Changes to one default rule; what is left out stays. ``ignore`` switches the rule off.

    ``window`` counts for all checks of the rule. ``threshold`` is a number for a rule of one check, else a mapping from
    a check's metric to a number; it has the meaning of the check's own bound (a plain number, or a multiple of a start
    or limit).
    """

    action: Literal["ignore", "warn", "pause", "rollback"] | None = None
    window: PositiveInt | None = None
    threshold: float | dict[str, float] | None = None
    after: PositiveInt | None = None
    adjust: Adjustment | None = None

    @field_validator("threshold", mode="before")
    @classmethod
    def _numbers(cls, given: Any) -> Any:
        # Without this the two branches of the union would each report their own mistake.
        numbers = given.values() if isinstance(given, dict) else [] if given is None else [given]
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
            raise ValueError("must be a number, or a mapping from a check's metric to a number")
        return given


class HealthConfig(Strict):
    """``enforce`` lets rules pause the run or roll it back; ``report`` only records findings.

    A run is rolled back at most ``max_rollbacks`` times; after that a rollback rule pauses it. ``rules`` changes
    default rules by name.
    """

    mode: Literal["enforce", "report"] = "enforce"
    max_rollbacks: NonNegativeInt = 2
    rules: dict[str, RuleChange] = {}

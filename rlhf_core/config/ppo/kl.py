"""The KL penalty of PPO: estimator, place, controller of its coefficient (algorithms.md §4.5)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rlhf_core.config.model import Strict, changed_field

KL_ERROR_CLIP = 0.2  # the relative error of one rollout's KL moves an adaptive coefficient by at most this share


class KlConfig(Strict):
    """Token-level KL penalty. ``target`` and ``horizon`` are read when ``controller`` is adaptive.

    ``measure_full`` adds the metric ``kl_full``, the exact sum over the vocabulary, to every rollout; the estimator
    ``full``, which needs that sum in the loss, adds it too.
    """

    coefficient: NonNegativeFloat = 0.05
    estimator: Literal["k1", "k2", "k3", "full"] = "k1"
    placement: Literal["reward", "loss"] = "reward"
    controller: Literal["constant", "adaptive"] = "constant"
    target: PositiveFloat = 6.0
    horizon: PositiveInt = 1000
    measure_full: bool = False

    @model_validator(mode="after")
    def _reward_takes_k1(self) -> KlConfig:
        if self.placement == "reward" and self.estimator != "k1" and self.coefficient > 0:
            raise ValueError(
                f"estimator {self.estimator} in the reward does not give the gradient of the KL (only k1 does); "
                "use estimator k1, or placement loss"
            )
        if self.placement == "loss" and self.estimator == "k1" and self.coefficient > 0:
            raise ValueError(
                "estimator k1 in the loss has a gradient of zero mean; use k2, k3 or full there, or placement reward"
            )
        if self.controller == "adaptive" and self.coefficient == 0:
            raise ValueError("an adaptive controller multiplies the coefficient, so a coefficient of 0 stays 0")
        if self.controller == "constant" and (unread := changed_field(self, "target", "horizon")):
            raise ValueError(f"{unread} steers the adaptive controller, but controller is constant")
        return self

    @property
    def measures_full(self) -> bool:
        """Whether the exact KL of rollouts is computed."""
        return self.measure_full or self.estimator == "full"

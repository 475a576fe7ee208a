"""How advantages are estimated: with a critic, or by comparing the replies to one prompt (algorithms.md §4)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from rlhf_core.config.model import Strict, changed_field


class AdvantageConfig(Strict):
    """``gae`` estimates advantages with a critic. ``rloo`` and ``grpo`` compare the replies to one prompt instead, so
    that there is no critic; ``divide_by_std`` is GRPO's division by the spread of each prompt's rewards.
    """

    estimator: Literal["gae", "rloo", "grpo"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    normalize: bool = False
    clip: PositiveFloat | None = None
    divide_by_std: bool = True

    @property
    def critic_free(self) -> bool:
        """Whether no critic is trained or read."""
        return self.estimator != "gae"

    @model_validator(mode="after")
    def _estimator_reads_what_is_set(self) -> AdvantageConfig:
        if self.estimator != "grpo" and not self.divide_by_std:
            raise ValueError(f"divide_by_std is a switch of estimator grpo, but estimator is {self.estimator}")
        if not self.critic_free:
            return self
        if unread := changed_field(self, "gamma", "lam"):
            raise ValueError(
                f"{unread} is read by estimator gae, but {self.estimator} takes the reward of a whole reply, without "
                "discount or critic; leave it at its default"
            )
        if self.normalize:
            raise ValueError(
                f"normalize whitens over tokens, but with estimator {self.estimator} the replies to each prompt are "
                "each other's baseline, which it would undo in favour of long replies; set it to false"
            )
        return self

"""Learning rates that suit a model: chosen where settings leave them open, and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from rlhf_core.config.base import SftConfig
from rlhf_core.config.model import OptimizerConfig, Strict
from rlhf_core.config.policy import (
    CriticConfig,
    DpoConfig,
    PolicyStageConfig,
    RejectionSamplingConfig,
)
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.reward import RewardConfig

FULL_LR, ADAPTER_LR = 1e-5, 1e-4
# A rate this many times the suitable one destroys what pretraining has learned within a few steps.
FAR_BEYOND = 20


@dataclass(frozen=True)
class SuitableRates:
    """Peak rates for a new model, for a pretrained one, and for adapters on one."""

    new: float
    pretrained: float
    adapters: float


SUPERVISED = {
    SftConfig: SuitableRates(3e-3, 1e-5, 1e-4),
    RewardConfig: SuitableRates(7e-4, 1e-5, 1e-4),
    CriticConfig: SuitableRates(1e-3, 1e-5, 1e-4),
    DpoConfig: SuitableRates(1e-4, 1e-6, 1e-5),
    RejectionSamplingConfig: SuitableRates(1e-3, 1e-5, 1e-4),
}
PPO_POLICY = SuitableRates(5e-4, 1e-6, 1e-5)
PPO_CRITIC = SuitableRates(1e-3, 5e-6, 5e-5)


@dataclass(frozen=True)
class TrainedPart:
    """One optimiser of a section of settings.

    Attributes:
        field: Its name there.
        optimizer: Its settings.
        suitable: The rates that suit it.
        adapters: Whether it trains adapters.
    """

    field: str
    optimizer: OptimizerConfig
    suitable: SuitableRates
    adapters: bool

    @property
    def usual(self) -> float:
        """The rate that suits a pretrained model, or adapters on one."""
        return self.suitable.adapters if self.adapters else self.suitable.pretrained

    @property
    def too_high(self) -> bool:
        """Whether the rate would wreck a pretrained model."""
        return rate_is_too_high(self.optimizer.lr, self.adapters)


Config = TypeVar("Config", bound=Strict)


def rate_is_too_high(lr: float | None, adapters: bool) -> bool:
    """Whether a peak rate is far beyond what suits a pretrained model, or adapters on one."""
    return lr is not None and lr > FAR_BEYOND * (ADAPTER_LR if adapters else FULL_LR)


def trained_parts(config: Strict, adapters: bool = False) -> Iterator[TrainedPart]:
    """Yield each optimiser of ``config``.

    Args:
        adapters: Whether adapters are trained where ``config`` does not say so itself; of PPO,
            whether the critic was pre-trained as adapters, which ``share_base`` keeps.
    """
    if isinstance(config, PpoConfig):
        yield TrainedPart(
            "policy_optimizer", config.policy_optimizer, PPO_POLICY, config.policy_lora is not None
        )
        if config.critic_optimizer is not None:
            on_base = config.critic_lora is not None or (config.share_base and adapters)
            yield TrainedPart("critic_optimizer", config.critic_optimizer, PPO_CRITIC, on_base)
        return
    for kind, suitable in SUPERVISED.items():
        if isinstance(config, kind):
            own = getattr(config, "lora", None) is not None
            yield TrainedPart("optimizer", getattr(config, "optimizer"), suitable, own or adapters)  # noqa: B009


def with_chosen_rates(config: Config, new: bool, adapters: bool = False) -> Config:
    """Return settings with a suitable rate in every optimiser that has none.

    Args:
        config: Settings of a training; those without an optimiser stay as they are.
        new: Whether the model was made from nothing.
        adapters: As in :func:`trained_parts`.
    """
    changes: dict[str, Strict] = {}
    for part in trained_parts(config, adapters):
        if part.optimizer.lr is None:
            lr = part.suitable.new if new else part.usual
            changes[part.field] = part.optimizer.model_copy(update={"lr": lr})
    if isinstance(config, PolicyStageConfig):
        policy, adapted = config.policy, config.policy_lora is not None
        dpo = with_chosen_rates(policy.dpo, new, adapted)
        rejection_sampling = with_chosen_rates(policy.rejection_sampling, new, adapted)
        changes["policy"] = policy.model_copy(
            update={"dpo": dpo, "rejection_sampling": rejection_sampling}
        )
    return config.model_copy(update=changes)

"""Learning rates that suit pretrained models, and the refusal of those that would wreck one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.config.stages.base import BaseConfig, is_pretrained
from rlhf_core.config.stages.critic import CriticConfig
from rlhf_core.config.stages.policy import PolicyConfig
from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.config.stages.reward import RewardConfig
from rlhf_core.config.stages.sft import SftConfig

PROFILE = "pretrained"
FULL_LR, ADAPTER_LR = 1e-5, 1e-4
# A rate this many times the suitable one destroys what pretraining has learned within a few steps.
FAR_BEYOND = 20


@dataclass(frozen=True)
class LearningRate:
    """The peak learning rate at ``path``, and whether it is that of adapters."""

    path: str
    value: float
    adapters: bool

    @property
    def suitable(self) -> float:
        """What suits a pretrained model, by order of magnitude."""
        return ADAPTER_LR if self.adapters else FULL_LR


def learning_rates(
    sft: SftConfig,
    reward: RewardConfig,
    referee: RewardConfig,
    judge: RewardConfig,
    critic: CriticConfig,
    ppo: PpoConfig,
    policy: PolicyConfig,
) -> list[LearningRate]:
    """The rates of all that trains weights of the base model, or adapters on them."""
    rates = [
        LearningRate("sft.optimizer.lr", sft.optimizer.lr, False),
        LearningRate("reward.optimizer.lr", reward.optimizer.lr, reward.lora is not None),
        LearningRate("referee.optimizer.lr", referee.optimizer.lr, referee.lora is not None),
        LearningRate("judge.optimizer.lr", judge.optimizer.lr, judge.lora is not None),
    ]
    adapted = ppo.policy_lora is not None
    if policy.method != "ppo":
        rate = getattr(policy, policy.method).optimizer.lr
        return [*rates, LearningRate(f"policy.{policy.method}.optimizer.lr", rate, adapted)]
    rates.append(LearningRate("ppo.policy_optimizer.lr", ppo.policy_optimizer.lr, adapted))
    # With a shared backbone critic pre-training moves a new value head alone.
    if ppo.critic_mode == "shared" or ppo.advantage.critic_free:
        return rates
    rates.append(LearningRate("critic.optimizer.lr", critic.optimizer.lr, critic.lora is not None))
    if ppo.critic_optimizer is not None:
        adapters = ppo.critic_lora is not None or (ppo.share_base and critic.lora is not None)
        rates.append(LearningRate("ppo.critic_optimizer.lr", ppo.critic_optimizer.lr, adapters))
    return rates


def refuse_high_learning_rates(base: BaseConfig, rates: Sequence[LearningRate]) -> None:
    """Check the learning rates of a pretrained model.

    Raises:
        ValueError: One of them is far beyond what suits it, and ``base.allow_high_learning_rates`` is not set.
    """
    if not is_pretrained(base.source) or base.allow_high_learning_rates:
        return
    high = [rate for rate in rates if rate.value > FAR_BEYOND * rate.suitable]
    if high:
        listed = ", ".join(f"{rate.path} {rate.value:g} (about {rate.suitable:g})" for rate in high)
        raise ValueError(
            f"base.source is a pretrained model, which learning rates this high wreck within a few steps: {listed}; "
            f"lower them, start from the profile {PROFILE}, or insist with base.allow_high_learning_rates true"
        )

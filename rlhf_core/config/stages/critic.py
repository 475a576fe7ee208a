"""Critic pre-training to a threshold (algorithms.md §3)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlhf_core.config.lora import LoraConfig
from rlhf_core.config.model import CheckpointConfig, OptimizerConfig, StageConfig
from rlhf_core.config.stages.policy import PolicyConfig
from rlhf_core.config.stages.ppo import PpoConfig


class CriticConfig(StageConfig):
    """``max_rollouts: 0`` skips pre-training. It ends early once explained variance stays at ``explained_variance`` or
    above for ``patience`` rollouts in a row, or the value loss has not fallen for ``plateau`` rollouts.

    ``lora`` trains adapters and the head instead of all weights.

    Rewards (normalisation, clip, KL) and advantages (gamma, lambda) are PPO's, so that values are in PPO's units. With
    ``ppo.critic_mode: shared`` only a value head is trained, on the frozen SFT model, whatever ``init`` says.
    """

    init: Literal["reward", "sft"] = "reward"
    max_rollouts: NonNegativeInt = 15
    batch_size: PositiveInt = 64
    minibatches: PositiveInt = 2
    epochs: PositiveInt = 2
    explained_variance: float = Field(default=0.75, le=1)
    patience: PositiveInt = 3
    plateau: PositiveInt = 8
    value_clip: PositiveFloat | None = None
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, schedule="constant", warmup=0.0)
    checkpoint: CheckpointConfig = CheckpointConfig(every=5)


class CriticStageConfig(CriticConfig):
    """The stage's settings with the policy's beside them: only ``ppo.rollout`` and ``policy.method`` are read."""

    ppo: PpoConfig = PpoConfig()
    policy: PolicyConfig = PolicyConfig()

    @property
    def no_critic_because(self) -> str:
        """The setting by which no critic is needed; empty where one is."""
        if self.policy.method != "ppo":
            return f"policy.method {self.policy.method}"
        if self.ppo.advantage.critic_free:
            return f"ppo.advantage.estimator {self.ppo.advantage.estimator}"
        return ""

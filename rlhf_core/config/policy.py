"""Critic pre-training for PPO, and the alternatives to PPO (algorithms.md §3, §10)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlhf_core.config.model import (
    CheckpointConfig,
    EpochLimit,
    LoraConfig,
    OptimizerConfig,
    StageConfig,
    Strict,
)
from rlhf_core.config.ppo import PpoConfig

Method = Literal["ppo", "dpo", "rejection_sampling"]
METHOD_NAMES: dict[Method, str] = {
    "ppo": "PPO",
    "dpo": "DPO",
    "rejection_sampling": "rejection sampling",
}


class DpoConfig(EpochLimit):
    """DPO on the reward model's pairs (Rafailov et al. 2023).

    The policy is the one of the last step.

    Attributes:
        beta: Strength of the pull to the reference.
        label_smoothing: Share of pairs assumed to be labelled the wrong way round (cDPO).
        length_normalized: Divides the log-probability of a reply by its tokens.
        steps: Optimiser steps.
        max_epochs: At most so many passes over the pairs: of few, fewer steps are taken; null: no
            limit.
        batch_size: Pairs of a step.
        micro_batch_size: Pairs of one pass, which changes no gradient; null: all of a step.
        max_tokens: Longest prompt and reply together; pairs with a longer one are dropped and
            counted, never cut.
        eval_every: Steps between measurements on the validation pairs.
        samples: Sample replies to validation prompts.
        optimizer: Its optimiser.
        checkpoint: Its checkpoints, in steps.
    """

    beta: PositiveFloat = 0.1
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    length_normalized: bool = False
    steps: PositiveInt = 200
    batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt | None = None
    max_tokens: PositiveInt = 256
    eval_every: PositiveInt = 50
    samples: PositiveInt = 8
    optimizer: OptimizerConfig = OptimizerConfig(warmup=0.1)
    checkpoint: CheckpointConfig = CheckpointConfig(every=100)


class RejectionSamplingConfig(Strict):
    """Fine-tuning on SFT's best replies by ``ppo.reward.sources`` (Dong et al. 2023).

    Replies are sampled as PPO's rollouts are, once, from SFT. One that did not end is never kept.

    Attributes:
        replies_per_prompt: Replies to each prompt, of which the best is kept.
        prompts: Training prompts; null: all.
        steps: Optimiser steps.
        batch_size: Replies of a step.
        micro_batch_size: Replies of one training pass, which changes no gradient; null: all of a
            step.
        eval_every: Steps between measurements of held-out perplexity.
        optimizer: Its optimiser.
        checkpoint: Its checkpoints, in steps.
    """

    replies_per_prompt: int = Field(default=8, ge=2)
    prompts: PositiveInt | None = None
    steps: PositiveInt = 200
    batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt | None = None
    eval_every: PositiveInt = 50
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every=100)


class PolicyConfig(Strict):
    """How the policy is trained. Evaluation, gates and registration are the same for all methods.

    Attributes:
        method: Decides which sections are read: `ppo` that of PPO; `dpo` its own here, of `ppo`
            only `policy_lora` and, for sample replies, `max_new_tokens`; `rejection_sampling` also
            how `ppo` samples and rewards.
        dpo: Of method `dpo`.
        rejection_sampling: Of method `rejection_sampling`.
    """

    method: Method = "ppo"
    dpo: DpoConfig = DpoConfig()
    rejection_sampling: RejectionSamplingConfig = RejectionSamplingConfig()


class PolicyStageConfig(PpoConfig):
    """The settings of stage ppo: section ``ppo``, with section ``policy`` beside it."""

    policy: PolicyConfig = PolicyConfig()


class CriticConfig(StageConfig):
    """Critic pre-training.

    Rewards (normalisation, clip, KL) and advantages (gamma, lambda) are PPO's, so that values are
    in PPO's units. With ``ppo.critic_mode: shared`` only a value head is trained, on the frozen SFT
    model, whatever ``init`` says.

    Attributes:
        init: Starts as the reward model (PPO-max), or as `sft` with a random head (shared: always
            SFT). Paper: both end alike; only the early numbers differ (5.3.3). Shows in:
            explained_variance.
        max_rollouts: Rollouts of critic pre-training; 0 skips it. Paper: steadies training, should
            replace warm-up (5.3.3); PPO-max. Shows in: explained_variance, value_loss.
        batch_size: Prompts of a pre-training rollout. Shows in: value_loss.
        minibatches: Optimiser steps per epoch there. Shows in: value_loss.
        epochs: Passes over such a rollout. Shows in: value_loss.
        explained_variance: Pre-training ends once explained variance stays at this or above for
            `patience` rollouts in a row. Paper: until the value loss approaches zero (5.3.3). Shows
            in: explained_variance.
        patience: So many rollouts. Shows in: reached_threshold.
        plateau: It also ends when the value loss has not fallen for so many rollouts. Shows in:
            value_loss.
        value_clip: Value clip during pre-training. Shows in: value_clip_fraction.
        lora: Trains adapters and the head instead of all weights.
        optimizer: Its optimiser.
        checkpoint: Its checkpoints, in rollouts.
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
    optimizer: OptimizerConfig = OptimizerConfig(schedule="constant", warmup=0.0)
    checkpoint: CheckpointConfig = CheckpointConfig(every=5)


class CriticStageConfig(CriticConfig):
    """The stage's settings; of the others ``ppo.rollout`` and ``policy.method`` are read."""

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

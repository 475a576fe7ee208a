"""PPO-max and every switch of it (algorithms.md §4 to 7).

Defaults are the paper's PPO-max at this scale.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from rlhf_core.config.health import HealthConfig
from rlhf_core.config.model import (
    CheckpointConfig,
    LoraConfig,
    OptimizerConfig,
    StageConfig,
    Strict,
    changed_field,
)
from rlhf_core.config.ppo_losses import (
    EntropyConfig,
    ImportanceSamplingCorrectionConfig,
    PtxConfig,
    SurrogateConfig,
)
from rlhf_core.config.reward_sources import DEFAULT_SOURCES, RewardSources
from rlhf_core.config.sampler import LocalSamplerConfig, SamplerConfig


class AdvantageConfig(Strict):
    """Advantages, with a critic or from the replies to one prompt.

    Attributes:
        estimator: `gae`; without a critic `rloo` (Ahmadian et al., 2024), `grpo` (Shao et al.,
            2024). Paper: GAE (3.2.2). Shows in: group_reward_std, policy_grad_norm.
        gamma: Discount. Shows in: value_loss.
        lam: λ of GAE: 1 is Monte Carlo, 0 is TD. Paper: 0.9, by its public code 0.95; of minor
            importance (C.3). Shows in: explained_variance, value_loss.
        normalize: Mean 0, variance 1 over the response tokens of a minibatch. Paper: like a clip on
            rewards, which it advises instead (5.3.1). Shows in: policy_grad_norm.
        clip: Clips advantages to ± this. Paper: like a reward clip, harder to choose (5.3.1, B.1).
            Shows in: policy_loss, kl.
        divide_by_std: `grpo` divides by the SD of a prompt's rewards; false: Dr. GRPO (Liu et al.,
            2025). Shows in: policy_grad_norm.
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
            raise ValueError(
                f"divide_by_std is a switch of estimator grpo, but estimator is {self.estimator}"
            )
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


KL_ERROR_CLIP = 0.2  # the relative error of one rollout's KL moves an adaptive coefficient by at most this share


class KlConfig(Strict):
    """Token-level KL penalty.

    Attributes:
        coefficient: β of the token-level penalty. Paper: critical to stability, allows longer
            training; 0.05 (5.3.2, B.2); PPO-max. Shows in: kl, perplexity_reference.
        estimator: `k1`, `k2`, `k3` or `full`, exact. Paper: k1 (5.3.2). Shows in: kl_k2, kl_k3,
            kl_full.
        placement: In the reward of each token, or in the loss. Paper: in the reward (5.3.2). Shows
            in: kl.
        controller: `adaptive` steers the coefficient to a target (Ziegler et al., 2019). Paper:
            constant. Shows in: kl_coefficient.
        target: Nats per sequence that the adaptive controller holds. Shows in: kl.
        horizon: Sequences over which β can change by a fifth, at most. Shows in: kl_coefficient.
        measure_full: Exact KL over the vocabulary in every rollout. Shows in: kl_full.
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
            raise ValueError(
                "an adaptive controller multiplies the coefficient, so a coefficient of 0 stays 0"
            )
        if self.controller == "constant" and (unread := changed_field(self, "target", "horizon")):
            raise ValueError(f"{unread} steers the adaptive controller, but controller is constant")
        return self

    @property
    def measures_full(self) -> bool:
        """Whether the exact KL of rollouts is computed."""
        return self.measure_full or self.estimator == "full"


CriticMode = Literal["separate", "shared"]
MICRO_BATCH_TOKENS = 4096
DEFAULT_WARMUP = 5  # iterations


class RewardShapingConfig(Strict):
    """Raw scores, scaled or normalised by running moments, then clipped, less penalties.

    Penalties are in units of the result: standard deviations of reward, unless ``transform`` is
    ``none``.

    Attributes:
        sources: Where raw scores come from, mixed by weights. Paper: one reward model (4). Shows
            in: reward_mean, source_NAME_mean.
        transform: `normalize`: (r − μ)/σ by running moments (PPO-max); `scale`: r/σ; `none`. Paper:
            scaling does not help; normalisation and clip stabilise (5.3.1). Shows in:
            reward_treated, moments_std.
        clip: Clips the transformed score to ± this; null: off. Paper: advises a relaxed clip
            (5.3.1); PPO-max. Shows in: reward_treated, kl.
        missing_eos_penalty: Subtracted where a reply does not end, in SD of reward; with transform
            `none` in its own unit. Shows in: missing_eos.
        length_penalty: Subtracted in proportion to length, whole at `ppo.max_new_tokens`. Paper:
            its reward model prefers long replies (4.3). Shows in: length,
            reward_length_correlation.
    """

    sources: RewardSources = DEFAULT_SOURCES
    transform: Literal["none", "scale", "normalize"] = "normalize"
    clip: PositiveFloat | None = 2.0
    missing_eos_penalty: NonNegativeFloat = 0.0
    length_penalty: NonNegativeFloat = 0.0


class SelectionConfig(Strict):
    """Which checkpoint becomes the policy.

    It is the one with the referee's best win rate on fixed validation prompts, under limits.

    Attributes:
        method: Best win rate by the referee under the limits below, within a standard error the
            nearest to SFT; or the `last`. Paper: the reward cannot tell (5.2, limitations). Shows
            in: selected_iteration.
        every: Iterations between evaluations. Shows in: win_rate.
        prompts: Fixed validation prompts. Shows in: win_rate_low95, win_rate_high95.
        batch_size: Replies sampled and judged together. Shows in: seconds_selection.
        max_kl: Limit, nats per sequence, of health rules too. Paper: KL tells (5.2). Shows in:
            selection_kl.
        max_length_ratio: Limit, times SFT's length. Paper: so does length (5.2). Shows in:
            selection_length_ratio.
        max_repetition_increase: Limit, added to SFT's repetition. Paper: fixed patterns (5.2).
            Shows in: selection_repetition_increase.
    """

    method: Literal["referee", "last"] = "referee"
    every: PositiveInt = 5
    prompts: PositiveInt = 128
    batch_size: PositiveInt = 64
    max_kl: PositiveFloat = 6.0
    max_length_ratio: PositiveFloat = 1.6
    max_repetition_increase: NonNegativeFloat = 0.02


class RolloutConfig(Strict):
    """Rollout settings shared by critic pre-training and PPO.

    All but the batch sizes and the sampler fix the scale of returns.

    Attributes:
        critic_mode: Two models and optimisers, or `shared`: a value head on the policy's backbone,
            loss = policy + `vf_loss_weight` × value + ptx; critic pre-training then fits the head
            alone, on the frozen SFT model. Paper: two models (5.1). Shows in: explained_variance,
            kl.
        max_new_tokens: Longest reply. Paper: collapsed models answer longer (5.2). Shows in:
            length, missing_eos.
        min_new_tokens: No end before so many tokens, in sampling and scoring alike. Shows in:
            short_replies.
        temperature: Of sampling and scoring; top-p and the like are for evaluation only. Paper:
            evaluates with top-p and a repetition penalty (6.1). Shows in: entropy,
            sampling_logp_difference_mean.
        micro_batch_size: Most sequences of a pass, which changes gradients by rounding alone; null:
            as `micro_batch_tokens` allows, else 16. Shows in: seconds_update.
        micro_batch_tokens: Positions of a pass, at most a tenth padding; null: `micro_batch_size`
            decides. Shows in: padding_share_scoring, padding_share_update.
        sampling_batch_size: Replies sampled at once, which bounds the cache; null: all of a
            process. Shows in: seconds_generation.
        sampler: Who samples the replies of rollouts and selection.
        kl: KL to the reference.
        reward: Sources and shaping of rewards.
        advantage: Advantages.
    """

    critic_mode: CriticMode = "separate"
    max_new_tokens: PositiveInt = 64
    min_new_tokens: NonNegativeInt = 0
    temperature: PositiveFloat = 1.0
    micro_batch_size: PositiveInt | None = None
    micro_batch_tokens: PositiveInt | None = MICRO_BATCH_TOKENS
    sampling_batch_size: PositiveInt | None = None
    sampler: SerializeAsAny[SamplerConfig] = LocalSamplerConfig()
    kl: KlConfig = KlConfig()
    reward: RewardShapingConfig = RewardShapingConfig()
    advantage: AdvantageConfig = AdvantageConfig()

    @property
    def plugins(self) -> list[tuple[str, str]]:
        """Group and name of each plugin that rollouts use, once."""
        plugins = [*self.sampler.plugins]
        for source in self.reward.sources:
            plugins += source.plugins
        return list(dict.fromkeys(plugins))


class PpoConfig(RolloutConfig, StageConfig):
    """All of PPO: its own settings, and those of rollouts that critic pre-training shares.

    Attributes:
        iterations: Rollouts, an update each. Paper: more need constraints (5.3.2). Shows in: kl,
            win_rate.
        batch_size: Replies of a rollout. Paper: 128 (5.1); a small buffer is part of PPO-max (5.4).
            Shows in: reward_std, seconds_generation.
        replies_per_prompt: Replies to each prompt, so `ppo.batch_size` / this many prompts; RLOO
            and GRPO need 2. Shows in: group_reward_std.
        minibatches: Optimiser steps per epoch over a rollout. Paper: 32 of 128, so four (5.1).
            Shows in: ratio_mean, clip_fraction.
        epochs: Passes over a rollout. Paper: one, by its public code. Shows in: old_policy_kl,
            clip_fraction.
        policy_init: The policy starts as the SFT model, or as `base`. Paper: without SFT it fails:
            language suffers, rewards stay lower (5.3.3). Shows in: perplexity_reference, kl.
        warmup_iterations: Linear warm-up of both, in place of the optimisers' own; null: 5, of
            fewer iterations all, none where an optimiser has its own. Paper: 10 % of steps; critic
            pre-training is better (5.1, 5.3.3). Shows in: policy_lr.
        value_clip: Keeps a value near the one before the update; null: off. Paper: part of PPO-max
            (5.4, B.1). Shows in: value_clip_fraction.
        vf_loss_weight: Weight of the value loss; matters with a shared backbone or joint norm.
            Paper: in the loss of its public code. Shows in: value_loss, policy_grad_norm.
        gradient_norm: Norms of policy and critic each, or `joint` over both. Paper: joint in its
            public code. Shows in: policy_grad_norm.
        target_kl_early_stop: Ends the policy's steps of an update before one whose minibatch shows
            a mean KL(old || new) above it, in nats per token; a separate critic makes all its
            steps. Shows in: early_stopped, steps.
        referee_every: The referee scores one of so many rollouts, for metrics alone. Shows in:
            referee_mean, reward_referee_correlation.
        surrogate: The policy's objective.
        importance_sampling_correction: Weights between sampler and trainer, or a ratio to the
            sampler.
        entropy: Entropy in the loss.
        ptx: The loss on texts.
        policy_lora: Trains adapters; the reference is the policy with them off. Shows in: kl.
        critic_lora: Trains adapters and the head of the critic. Shows in: explained_variance.
        share_base: Reward model, referee and critic, adapters on SFT too, compute on the policy's
            weights.
        policy_optimizer: The policy's optimiser; with a shared backbone it trains everything.
            Paper: peak rate 5e-7 for 7 billion parameters (5.1). Shows in: policy_lr, kl.
        critic_optimizer: The critic's optimiser; null with a shared backbone or without a critic.
            Paper: peak rate 1.65e-6, three times the policy's (5.1). Shows in: critic_lr,
            value_loss.
        selection: Selection of the checkpoint.
        health: Health rules.
        checkpoint: Checkpoints, in iterations.
    """

    iterations: PositiveInt = 45
    batch_size: PositiveInt = 64
    replies_per_prompt: PositiveInt = 1
    minibatches: PositiveInt = 2
    epochs: PositiveInt = 1
    policy_init: Literal["sft", "base"] = "sft"
    warmup_iterations: NonNegativeInt | None = None
    value_clip: PositiveFloat | None = 0.2
    vf_loss_weight: PositiveFloat = 1.0
    gradient_norm: Literal["separate", "joint"] = "separate"
    target_kl_early_stop: PositiveFloat | None = None
    referee_every: PositiveInt = 1
    surrogate: SurrogateConfig = SurrogateConfig()
    importance_sampling_correction: ImportanceSamplingCorrectionConfig = (
        ImportanceSamplingCorrectionConfig()
    )
    entropy: EntropyConfig = EntropyConfig()
    ptx: PtxConfig = PtxConfig()
    policy_lora: LoraConfig | None = None
    critic_lora: LoraConfig | None = None
    share_base: bool = False
    policy_optimizer: OptimizerConfig = OptimizerConfig(schedule="constant", warmup=0.0)
    critic_optimizer: OptimizerConfig | None = OptimizerConfig(schedule="constant", warmup=0.0)
    selection: SelectionConfig = SelectionConfig()
    health: HealthConfig = HealthConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every=5)

    @model_validator(mode="after")
    def _critic_settings_have_a_critic(self) -> PpoConfig:
        critic_free, estimator = self.advantage.critic_free, self.advantage.estimator
        if critic_free:
            unread = changed_field(self, "critic_mode", "vf_loss_weight")
            optional = ("critic_lora", "critic_optimizer", "value_clip")
            given = [name for name in optional if getattr(self, name) is not None]
            unread = unread or changed_field(self, *given)
            if unread:
                remedy = "set it to null" if unread in optional else "leave it at its default"
                raise ValueError(
                    f"{unread} is about the critic, and advantage.estimator {estimator} has none: {remedy}"
                )
            if self.gradient_norm == "joint":
                raise ValueError(
                    f"gradient_norm joint clips policy and critic together, but advantage.estimator {estimator} has no "
                    "critic; use separate"
                )
        if self.critic_mode != "shared":
            if self.critic_optimizer is None and not critic_free:
                raise ValueError(
                    "critic_optimizer is null, but critic_mode is separate: a critic of its own needs one"
                )
            return self
        if self.critic_optimizer is not None and changed_field(self, "critic_optimizer"):
            raise ValueError(
                "critic_optimizer trains a separate critic, but critic_mode is shared: policy_optimizer trains the one "
                "model there is, and vf_loss_weight sets the critic's share; set critic_optimizer to null"
            )
        if self.critic_lora is not None:
            raise ValueError(
                "critic_lora adapts a separate critic, but critic_mode is shared: policy_lora adapts the one backbone "
                "there is, and the value head is trained whole; set critic_lora to null"
            )
        if self.policy_init != "sft":
            raise ValueError(
                f"policy_init {self.policy_init} with critic_mode shared: the value head is pre-trained on the SFT "
                "model's hidden states and would be put on another model's; use policy_init sft"
            )
        return self

    @model_validator(mode="after")
    def _batches_are_whole(self) -> PpoConfig:
        size, replies = self.batch_size, self.replies_per_prompt
        shortest = KL_ERROR_CLIP * size
        if size % replies:
            raise ValueError(
                f"batch_size {size} counts replies and is not a multiple of replies_per_prompt {replies}"
            )
        if self.advantage.critic_free and replies < 2:
            raise ValueError(
                f"advantage.estimator {self.advantage.estimator} compares replies to the same prompt, but "
                f"replies_per_prompt is {replies}: sample at least 2, such as 4"
            )
        if size % self.minibatches:
            raise ValueError(
                f"batch_size {size} is not a multiple of minibatches {self.minibatches}"
            )
        if self.min_new_tokens >= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} must be below max_new_tokens {self.max_new_tokens}"
            )
        if self.kl.controller == "adaptive" and self.kl.horizon <= shortest:
            raise ValueError(
                f"ppo.kl.horizon {self.kl.horizon} is too short for batch_size {size}: one rollout of low "
                f"KL would multiply the coefficient by {1 - shortest / self.kl.horizon:.2g}, so that drift costs "
                f"nothing or is rewarded; use a horizon above {math.floor(shortest)} (batch_size / 5)"
            )
        return self

    @model_validator(mode="after")
    def _steps_fit_together(self) -> PpoConfig:
        if self.policy_lora is not None and self.policy_init != "sft":
            raise ValueError(
                "policy_lora makes the policy without its adapters the reference, which is SFT: policy_init must be sft"
            )
        optimizers = self.optimizers
        norms = [optimizer.max_grad_norm for optimizer in optimizers]
        if self.gradient_norm == "joint" and len(set(norms)) > 1:
            raise ValueError(
                "gradient_norm joint clips policy and critic together: give policy_optimizer and critic_optimizer the "
                f"same max_grad_norm (they have {norms[0]} and {norms[1]})"
            )
        if self.warmup_iterations and any(optimizer.warmup for optimizer in optimizers):
            raise ValueError(
                "warm-up is set twice: use warmup_iterations, or the optimisers' warmup, not both"
            )
        if self.warmup_iterations is not None and self.warmup_iterations > self.iterations:
            raise ValueError(
                f"warmup_iterations {self.warmup_iterations} is more than iterations {self.iterations}: "
                "the learning rate would never reach its peak; set ppo.warmup_iterations, too"
            )
        if self.target_kl_early_stop is not None and self.surrogate.fixed_reference:
            raise ValueError(
                "target_kl_early_stop measures the KL to the policy in the ratio, under surrogate.fixed_reference the "
                "reference: it would end every update once the policy has left that"
            )
        if self.target_kl_early_stop is not None and self.epochs * self.minibatches == 1:
            raise ValueError(
                "target_kl_early_stop is looked at before each step, and the first step of an update has a KL of 0: "
                "with epochs 1 and minibatches 1 it never acts"
            )
        if self.sampler.kind == "local":
            return self
        if self.importance_sampling_correction.mode not in ("always", "ratio"):
            raise ValueError(
                "other samplers round otherwise: set importance_sampling_correction.mode to always or ratio"
            )
        if self.policy_lora is not None and self.policy_lora.quantize is not None:
            raise ValueError(
                f"sampler.kind {self.sampler.kind} gets the adapters merged into the weights, which 4-bit weights "
                "cannot take: set policy_lora.quantize to null, or sampler.kind to local"
            )
        return self

    @model_validator(mode="after")
    def _ratio_to_the_sampler(self) -> PpoConfig:
        if self.importance_sampling_correction.mode != "ratio":
            return self
        others = "auto, always or never" if self.sampler.kind == "local" else "always"
        mode = "importance_sampling_correction.mode ratio"
        if self.critic_mode == "shared":
            raise ValueError(
                f"{mode} leaves out the policy's pass over most replies, but with critic_mode shared that pass gives "
                f"the values, too: use critic_mode separate, or mode {others}"
            )
        if self.kl.measures_full:
            raise ValueError(
                f"{mode} leaves out the policy's pass over most replies, but the exact KL of a rollout needs it: set "
                f"kl.measure_full to false and kl.estimator to another than full, or use mode {others}"
            )
        if self.surrogate.fixed_reference:
            raise ValueError(
                f"{mode} takes the ratio to the sampler, but surrogate.fixed_reference to the reference: set that to "
                f"false, or use mode {others}"
            )
        return self

    @property
    def optimizers(self) -> list[OptimizerConfig]:
        """The optimisers of the models that are trained, the policy's first."""
        if self.critic_optimizer is None:
            return [self.policy_optimizer]
        return [self.policy_optimizer, self.critic_optimizer]

    @property
    def warmup(self) -> int:
        """Iterations of linear warm-up; 0 leaves it to the optimisers."""
        if self.warmup_iterations is not None:
            return self.warmup_iterations
        if any(optimizer.warmup for optimizer in self.optimizers):
            return 0
        return min(DEFAULT_WARMUP, self.iterations)

    @property
    def rollout(self) -> RolloutConfig:
        """The settings that critic pre-training shares with PPO, without the others."""
        return RolloutConfig(**{name: getattr(self, name) for name in RolloutConfig.model_fields})

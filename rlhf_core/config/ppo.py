"""PPO-max and every switch of it (algorithms.md §4 to 7). Defaults are the paper's PPO-max at this scale."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlhf_core.config.lora import LoraConfig
from rlhf_core.config.model import CheckpointConfig, OptimizerConfig, StageConfig, Strict


class KlConfig(Strict):
    """Token-level KL penalty. ``target`` and ``horizon`` are read when ``controller`` is adaptive."""

    coefficient: NonNegativeFloat = 0.05
    estimator: Literal["k1", "k2", "k3", "full"] = "k1"
    placement: Literal["reward", "loss"] = "reward"
    controller: Literal["constant", "adaptive"] = "constant"
    target: PositiveFloat = 6.0
    horizon: PositiveInt = 1000

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
        return self


class RewardShapingConfig(Strict):
    """Scaling or normalisation by running moments, then clip; shaping terms are in standard deviations of reward.

    ``length_penalty`` is subtracted from a reply of ``max_new_tokens`` tokens, and in proportion from shorter ones.
    """

    transform: Literal["none", "scale", "normalize"] = "normalize"
    clip: PositiveFloat | None = 2.0
    missing_eos_penalty: NonNegativeFloat = 0.0
    length_penalty: NonNegativeFloat = 0.0


class AdvantageConfig(Strict):
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    normalize: bool = False
    clip: PositiveFloat | None = None


class SurrogateConfig(Strict):
    """``clip: null`` gives the unclipped surrogate. ``penalty`` is the paper's PPO-penalty objective."""

    kind: Literal["clip", "penalty"] = "clip"
    clip: PositiveFloat | None = 0.2
    dual_clip: float | None = Field(default=None, gt=1)
    penalty: NonNegativeFloat = 0.1
    aggregation: Literal["token", "sequence"] = "token"
    fixed_reference: bool = False

    @model_validator(mode="after")
    def _dual_clip_needs_clip(self) -> SurrogateConfig:
        if self.dual_clip is not None and (self.kind != "clip" or self.clip is None):
            raise ValueError("dual_clip bounds the clipped surrogate: it needs kind clip and a clip size")
        return self


class EntropyConfig(Strict):
    """``bonus`` subtracts ``weight * H``; ``target`` adds ``weight * |H - target|`` (MOSS-RLHF's clip region)."""

    kind: Literal["off", "bonus", "target"] = "off"
    weight: NonNegativeFloat = 0.0
    target: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _weighted(self) -> EntropyConfig:
        if self.kind != "off" and self.weight == 0:
            raise ValueError(f"entropy kind {self.kind} with weight 0 does nothing; set a weight, or kind off")
        return self


class PtxConfig(Strict):
    """PPO-ptx: cross-entropy on ``batch_size`` pretraining or demonstration texts in every policy update."""

    weight: NonNegativeFloat = 0.1
    batch_size: PositiveInt = 16
    data: Literal["demonstrations", "pretrain"] = "demonstrations"


class SelectionConfig(Strict):
    """Which checkpoint becomes the policy: the one with the referee's best win rate on fixed validation prompts.

    It must keep the limits on KL (nats per sequence), reply length (times SFT's) and repetition (added to SFT's).
    ``last`` keeps the final one. ``batch_size`` replies are sampled and judged together: it bounds memory, and
    every reply keeps its own random numbers.
    """

    method: Literal["referee", "last"] = "referee"
    every: PositiveInt = 5
    prompts: PositiveInt = 128
    batch_size: PositiveInt = 64
    max_kl: PositiveFloat = 6.0
    max_length_ratio: PositiveFloat = 1.6
    max_repetition_increase: NonNegativeFloat = 0.02


class HealthConfig(Strict):
    """``enforce`` stops on a pause rule; ``report`` only records findings."""

    mode: Literal["enforce", "report"] = "enforce"


class PpoUnits(Strict):
    """What fixes the units that values live in: critic pre-training and PPO must agree on every one of these."""

    max_new_tokens: PositiveInt = 64
    min_new_tokens: NonNegativeInt = 0
    temperature: PositiveFloat = 1.0
    micro_batch_size: PositiveInt | None = None
    kl: KlConfig = KlConfig()
    reward: RewardShapingConfig = RewardShapingConfig()
    advantage: AdvantageConfig = AdvantageConfig()


class PpoConfig(StageConfig):
    """All of PPO. ``micro_batch_size`` bounds the sequences of one pass (null: 16) and never changes a gradient.

    ``warmup_iterations`` raises both learning rates linearly; it replaces the optimisers' own ``warmup`` share.
    ``target_kl_early_stop`` ends an update before a step whose minibatch shows a mean KL(old || new) above it, in nats
    per token. ``min_new_tokens`` forbids the end marker before it, in sampling and in scoring alike.
    With ``policy_lora`` only adapters are trained, and the reference is the policy with its adapters off.
    """

    iterations: PositiveInt = 45
    batch_size: PositiveInt = 64
    minibatches: PositiveInt = 2
    epochs: PositiveInt = 1
    micro_batch_size: PositiveInt | None = None
    max_new_tokens: PositiveInt = 64
    min_new_tokens: NonNegativeInt = 0
    temperature: PositiveFloat = 1.0
    policy_init: Literal["sft", "base"] = "sft"
    warmup_iterations: NonNegativeInt = 5
    value_clip: PositiveFloat | None = 0.2
    vf_loss_weight: PositiveFloat = 1.0
    gradient_norm: Literal["separate", "joint"] = "separate"
    target_kl_early_stop: PositiveFloat | None = None
    kl: KlConfig = KlConfig()
    reward: RewardShapingConfig = RewardShapingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    surrogate: SurrogateConfig = SurrogateConfig()
    entropy: EntropyConfig = EntropyConfig()
    ptx: PtxConfig = PtxConfig()
    policy_lora: LoraConfig | None = None
    critic_lora: LoraConfig | None = None
    policy_optimizer: OptimizerConfig = OptimizerConfig(lr=5e-4, schedule="constant", warmup=0.0)
    critic_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, schedule="constant", warmup=0.0)
    selection: SelectionConfig = SelectionConfig()
    health: HealthConfig = HealthConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every=5)

    @model_validator(mode="after")
    def _consistent(self) -> PpoConfig:
        if self.batch_size % self.minibatches:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of minibatches {self.minibatches}")
        if self.min_new_tokens >= self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} must be below max_new_tokens {self.max_new_tokens}")
        if self.policy_lora is not None and self.policy_init != "sft":
            raise ValueError(
                "policy_lora makes the policy without its adapters the reference, which is SFT: policy_init must be sft"
            )
        policy, critic = self.policy_optimizer, self.critic_optimizer
        if self.gradient_norm == "joint" and policy.max_grad_norm != critic.max_grad_norm:
            raise ValueError(
                "gradient_norm joint clips policy and critic together: give policy_optimizer and critic_optimizer the "
                f"same max_grad_norm (they have {policy.max_grad_norm} and {critic.max_grad_norm})"
            )
        if self.warmup_iterations and (policy.warmup or critic.warmup):
            raise ValueError("warm-up is set twice: use warmup_iterations, or the optimisers' warmup, not both")
        return self

    @property
    def units(self) -> PpoUnits:
        """The settings that critic pre-training shares with PPO."""
        return PpoUnits(**{name: getattr(self, name) for name in PpoUnits.model_fields})

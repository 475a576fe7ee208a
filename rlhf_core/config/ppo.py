"""PPO-max and every switch of it (ALGORITHMS sections 4 to 7). Defaults are the paper's PPO-max at this scale."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

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
        return self


class RewardShapingConfig(Strict):
    """Scaling or normalisation by running moments, then clip; shaping terms are in standard deviations of reward."""

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


class EntropyConfig(Strict):
    """``bonus`` subtracts ``weight * H``; ``target`` adds ``weight * |H - target|`` (MOSS-RLHF's clip region)."""

    kind: Literal["off", "bonus", "target"] = "off"
    weight: NonNegativeFloat = 0.0
    target: NonNegativeFloat = 0.0


class PtxConfig(Strict):
    """PPO-ptx: cross-entropy on ``batch_size`` pretraining or demonstration texts in every policy update."""

    weight: NonNegativeFloat = 0.1
    batch_size: PositiveInt = 16
    data: Literal["demonstrations", "pretrain"] = "demonstrations"


class SelectionConfig(Strict):
    """Which checkpoint becomes the policy: the referee's win rate against SFT on fixed validation prompts, under limits
    on KL (nats per sequence), reply length (times SFT's) and repetition (added to SFT's). ``last`` keeps the final one."""

    method: Literal["referee", "last"] = "referee"
    every: PositiveInt = 5
    prompts: PositiveInt = 128
    max_kl: PositiveFloat = 6.0
    max_length_ratio: PositiveFloat = 1.6
    max_repetition_increase: NonNegativeFloat = 0.02


class HealthConfig(Strict):
    """``enforce`` stops on a pause rule; ``report`` only records findings."""

    mode: Literal["enforce", "report"] = "enforce"


class PpoConfig(StageConfig):
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
        return self

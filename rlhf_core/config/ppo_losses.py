"""The terms of the policy's loss in PPO: surrogate, corrections, entropy, and texts (algorithms.md §6)."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rlhf_core.config.model import (
    Strict,
    changed_field,
)
from rlhf_core.config.reward import CategoryShares


class PtxConfig(Strict):
    """PPO-ptx: cross-entropy on pretraining or demonstration texts in every policy update.

    Attributes:
        weight: Weight of cross-entropy on texts in every update; 0: off. Paper: relieves the loss
            of language (3.2.3, 6.4); PPO-max. Shows in: ptx_loss, perplexity_reference.
        batch_size: Texts per optimiser step. Shows in: ptx_loss.
        micro_batch_size: Texts of one pass; null: `ppo.micro_batch_size`.
        data: Which texts; with `both` each text of the two sets alike, so each set has a share by
            its size. Paper: pretraining data (3.2.3). Shows in: ptx_loss, perplexity_pretrain.
        category_shares: By category, its share of the texts, such as `{harmless: 0.17}`. Shows in:
            ptx_loss.
    """

    weight: NonNegativeFloat = 0.1
    batch_size: PositiveInt = 16
    micro_batch_size: PositiveInt | None = None
    data: Literal["demonstrations", "pretrain", "both"] = "demonstrations"
    category_shares: CategoryShares = {}

    @model_validator(mode="after")
    def _shares_of_texts(self) -> PtxConfig:
        if self.category_shares and self.weight == 0:
            raise ValueError(
                "category_shares mixes the ptx texts, but weight is 0; set it, or take the shares out"
            )
        if self.category_shares and self.data == "both":
            raise ValueError(
                "category_shares mixes the texts of one set, but data is both; name one, or take them out"
            )
        return self


class SurrogateConfig(Strict):
    """The policy's objective.

    Attributes:
        kind: Clipped surrogate, or `penalty`: −ρA + w·KL(π_old‖π). Paper: both defined (3.2.3); the
            clip is of minor importance (C); PPO-max. Shows in: clip_fraction, old_policy_kl.
        clip: ε of the clip; null: none. Shows in: clip_fraction.
        clip_high: Its upper ε, where that is larger (clip-higher of DAPO, Yu et al., 2025); null:
            as `clip`. Shows in: clip_fraction, entropy.
        ratio: Of each `token`, or one of a whole `sequence`, the geometric mean of its tokens'
            (GSPO, Zheng et al., 2025), which takes `aggregation: sequence` and a far smaller clip.
            Shows in: ratio_mean, clip_fraction.
        dual_clip: Bounds the loss where A < 0 (Ye et al., 2020); above 1. Shows in: ratio_max.
        penalty: Weight w of kind `penalty`. Shows in: old_policy_kl.
        aggregation: Mean over all tokens of a step, or per `sequence` first. Shows in: policy_loss.
        fixed_reference: Ratio to the reference: a trust region at SFT. Paper: fluctuates late; with
            a KL penalty steadier, at the cost of the final policy (5.3.2). Shows in: first_ratio,
            ratio_mean.
    """

    kind: Literal["clip", "penalty"] = "clip"
    clip: PositiveFloat | None = 0.2
    clip_high: PositiveFloat | None = None
    ratio: Literal["token", "sequence"] = "token"
    dual_clip: float | None = Field(default=None, gt=1)
    penalty: NonNegativeFloat = 0.1
    aggregation: Literal["token", "sequence"] = "token"
    fixed_reference: bool = False

    @model_validator(mode="after")
    def _kind_has_its_own_settings(self) -> SurrogateConfig:
        clips = self.kind == "clip" and self.clip is not None
        if self.dual_clip is not None and not clips:
            raise ValueError(
                "dual_clip bounds the clipped surrogate: it needs kind clip and a clip size"
            )
        is_upper = (
            self.clip is not None and self.clip_high is not None and self.clip_high >= self.clip
        )
        if self.clip_high is not None and not (clips and is_upper):
            raise ValueError(
                "clip_high is the upper clip, not below clip: it needs kind clip and a clip size"
            )
        if self.ratio == "sequence" and (self.kind != "clip" or self.aggregation != "sequence"):
            raise ValueError(
                "ratio sequence gives a reply one ratio: it needs kind clip and aggregation sequence"
            )
        if self.kind == "clip" and changed_field(self, "penalty"):
            raise ValueError("penalty is the weight of kind penalty, but kind is clip")
        if self.kind == "penalty" and self.clip is not None and changed_field(self, "clip"):
            raise ValueError("clip is the size of kind clip; kind penalty clips nothing")
        if self.kind == "penalty" and self.penalty == 0:
            raise ValueError(
                "kind penalty with penalty 0 is the unclipped surrogate; write kind clip with clip null"
            )
        return self


class ImportanceSamplingCorrectionConfig(Strict):
    """What the policy's loss does about rounding between sampler and trainer.

    Attributes:
        mode: Truncated importance weights: `auto` (bfloat16, TF32), `always`, `never`; `ratio`:
            none, as PPO's ratio is to the sampler, and the policy scores an eighth of the replies.
            Shows in: importance_sampling_ratio_mean, first_ratio.
        cap: The largest weight of a token. Shows in: importance_sampling_ratio_capped.
    """

    mode: Literal["auto", "always", "never", "ratio"] = "auto"
    cap: float = Field(default=2.0, ge=1)

    @property
    def scored_every(self) -> int:
        """The policy scores every n-th reply of a rollout; 1 is all of them."""
        return 8 if self.mode == "ratio" else 1

    @model_validator(mode="after")
    def _applied(self) -> ImportanceSamplingCorrectionConfig:
        if self.mode in ("never", "ratio") and changed_field(self, "cap"):
            raise ValueError(f"cap bounds the weights of the correction, but mode is {self.mode}")
        return self


class EntropyConfig(Strict):
    """Entropy in the loss (MOSS-RLHF's clip region is kind ``target``).

    Attributes:
        kind: `bonus`: −w·H; `target`: w·|H − H*| (the paper's clip region). Paper: very sensitive;
            recommends the KL penalty (5.3.2, B.3). Shows in: entropy, distinct_2.
        weight: Weight w. Shows in: entropy.
        target: The target H*, in nats per token. Shows in: entropy.
    """

    kind: Literal["off", "bonus", "target"] = "off"
    weight: NonNegativeFloat = 0.0
    target: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _weighted(self) -> EntropyConfig:
        if self.kind != "off" and self.weight == 0:
            raise ValueError(
                f"entropy kind {self.kind} with weight 0 does nothing; set a weight, or kind off"
            )
        if self.kind == "off" and (unread := changed_field(self, "weight", "target")):
            raise ValueError(f"{unread} is set but entropy kind is off, so it would do nothing")
        if self.kind == "bonus" and self.target > 0:
            raise ValueError("target is read by entropy kind target; a bonus has none")
        if self.kind == "target" and self.target == 0:
            raise ValueError(
                "entropy kind target needs a target above 0 (nats per token): 0 asks for no variety at all"
            )
        return self

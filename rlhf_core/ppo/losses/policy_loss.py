"""The policy's loss: surrogate with ratio clip, KL in the loss, entropy (algorithms.md §6).

Per-token functions return terms to be *minimised*, before aggregation; ``loss_reduction.aggregate`` applies masks.
Shapes: B sequences, T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.stages.ppo import PpoConfig, SurrogateConfig
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses.entropy import entropy_term
from rlhf_core.ppo.losses.importance_sampling import ratios
from rlhf_core.ppo.losses.loss_reduction import StepSize, aggregate, masked_sum
from rlhf_core.ppo.losses.truncated_importance_sampling import truncated_weights
from rlhf_core.ppo.metrics import MetricRecord
from rlhf_core.ppo.rewards.kl import kl_estimate
from rlhf_core.sampling.token_statistics import TokenStatistics
from rlhf_core.training.device_scalars import Scalar, device_scalar


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: float | None, dual_clip: float | None = None) -> Tensor:
    """``-min(rho A, clip(rho, 1-eps, 1+eps) A)``: (B, T) -> (B, T). Source: Schulman et al. 2017, equation 7.

    ``clip=None`` is the unclipped surrogate. ``dual_clip`` c > 1 bounds it where A < 0: ``-max(min(..), c A)`` (Ye et
    al. 2020, equation 5).
    """
    objective = ratio * advantages
    if clip is not None:
        objective = torch.minimum(objective, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if dual_clip is not None:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective


def penalty_surrogate(ratio: Tensor, advantages: Tensor, weight: float) -> Tensor:
    """PPO-penalty: ``-rho A + weight * KL(pi_old || pi)``: (B, T) -> (B, T). Source: paper, equation 11.

    The tokens come from pi_old, so ``rho - 1 - log rho`` is an unbiased estimate of that KL, and so is its gradient.
    """
    return -ratio * advantages + weight * old_policy_kl(ratio)


def old_policy_kl(ratio: Tensor) -> Tensor:
    """Never-negative estimate of KL(pi_old || pi) per token, ``rho - 1 - log rho``: (B, T) -> (B, T)."""
    return ratio - 1 - ratio.log()


def surrogate(ratio: Tensor, advantages: Tensor, config: SurrogateConfig) -> Tensor:
    """The policy objective that ``config`` names: (B, T) -> (B, T)."""
    if config.kind == "penalty":
        return penalty_surrogate(ratio, advantages, config.penalty)
    return clipped_surrogate(ratio, advantages, config.clip, config.dual_clip)


def clip_fraction_mask(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Where the clip takes the gradient away (the clipped branch is the smaller one): (B, T) -> bool (B, T)."""
    return ((ratio > 1 + clip) & (advantages > 0)) | ((ratio < 1 - clip) & (advantages < 0))


@dataclass(frozen=True)
class PolicyMetrics(MetricRecord):
    """The policy's loss on one minibatch, and how far the policy has moved from its behaviour policy."""

    policy_loss: Scalar
    ratio_mean: Scalar
    ratio_max: Scalar
    old_policy_kl: Scalar
    clip_fraction: Scalar | None = None
    importance_sampling_ratio_mean: Scalar | None = None
    importance_sampling_ratio_capped: Scalar | None = None


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's loss in one optimiser step: corrected surrogate, KL in the loss, entropy.

    Attributes:
        config: The switches.
        reference: The frozen SFT policy; read only for an exact KL in the loss.
        kl_coef: Weight of the KL penalty, if ``config`` places it in the loss.
        entropy_sign: See :func:`~rlhf_core.ppo.losses.entropy.entropy_sign`.
        correction_cap: Cap of the weights that correct the surrogate for a sampler that rounds otherwise than the
            trainer; None for no correction.
    """

    config: PpoConfig
    reference: PreTrainedModel
    kl_coef: float
    entropy_sign: float
    correction_cap: float | None = None

    @property
    def entropy_weight(self) -> float:
        """Signed weight of the entropy in the loss; with 0 entropies are not needed."""
        return self.entropy_sign * self.config.entropy.weight

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss holds a KL penalty."""
        return self.config.kl.placement == "loss" and self.kl_coef > 0

    @property
    def exact_kl_reference(self) -> PreTrainedModel | None:
        """The model to which the loss needs the exact KL over the vocabulary, if it does."""
        return self.reference if self.kl_in_loss and self.config.kl.estimator == "full" else None

    def loss(self, outputs: TokenStatistics, batch: Experience, size: StepSize) -> tuple[Tensor, PolicyMetrics]:
        """The share of one micro-batch, a scalar, from what the current policy says of its tokens (b, t).

        The advantages of ``batch`` are normalised and clipped already.
        """
        surrogate_config, mask, logprobs = self.config.surrogate, batch.response_mask, outputs.logprobs
        ratio = ratios(logprobs, batch.old_logprobs, mask)
        terms = surrogate(ratio, batch.advantages, surrogate_config)
        weight_mean = weights_capped = None
        if self.correction_cap is not None:
            trainer, sampler = batch.policy_logprobs, batch.sampler_logprobs
            weights = truncated_weights(trainer, sampler, mask, self.correction_cap)
            terms = weights * terms
            weight_mean = device_scalar(masked_sum(weights, mask)) / size.tokens
            capped = (weights >= self.correction_cap).float()
            weights_capped = device_scalar(masked_sum(capped, mask)) / size.tokens
        if self.kl_in_loss:
            terms = terms + self.kl_coef * self._kl(outputs, batch)
        loss = aggregate(terms, mask, size, surrogate_config.aggregation)
        ratio, clip_fraction = ratio.detach(), None
        if surrogate_config.kind == "clip" and surrogate_config.clip is not None:
            clipped = clip_fraction_mask(ratio, batch.advantages, surrogate_config.clip)
            clip_fraction = device_scalar(masked_sum(clipped.float(), mask)) / size.tokens
        metrics = PolicyMetrics(
            policy_loss=device_scalar(loss),
            ratio_mean=device_scalar(masked_sum(ratio, mask)) / size.tokens,
            ratio_max=device_scalar(ratio.max()),
            old_policy_kl=device_scalar(masked_sum(old_policy_kl(ratio), mask)) / size.tokens,
            clip_fraction=clip_fraction,
            importance_sampling_ratio_mean=weight_mean,
            importance_sampling_ratio_capped=weights_capped,
        )
        if outputs.entropy is not None:
            loss = loss + entropy_term(outputs.entropy, mask, size, self.entropy_weight)
        return loss, metrics

    def _kl(self, outputs: TokenStatistics, batch: Experience) -> Tensor:
        """KL of the current policy to the reference (b, t); masked positions may hold anything."""
        estimator = self.config.kl.estimator
        if estimator == "full":
            assert outputs.full_kl is not None
            return outputs.full_kl
        masked = torch.where(batch.response_mask, outputs.logprobs, batch.ref_logprobs)
        return kl_estimate(masked, batch.ref_logprobs, estimator)

"""The losses of policy and critic (algorithms.md §6; paper, sections 5.3.2 and 5.3.3).

Functions of tokens return terms to be *minimised*; ``aggregate`` applies the mask and makes one
number of them. A mean over a micro-batch would weight short batches more, so every term is divided
by counts of the *whole* optimiser step (:class:`~rlhf_core.training.losses.StepTotals`):
micro-batch size and order never change the gradient.

Shapes: B sequences, T response positions; (b, t) of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.ppo_losses import EntropyConfig, ImportanceSamplingCorrectionConfig
from rlhf_core.data.tokens import right_pad
from rlhf_core.models.forward import LOGITS_BYTES, selected_logits
from rlhf_core.models.precision import Precision
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.kl import kl_estimate
from rlhf_core.training.engine.base import Engine, StepResult, joint_step
from rlhf_core.training.losses import StepTotals, chunked_cross_entropy
from rlhf_core.training.passes import Scalar, device_scalar

Aggregation = Literal["token", "sequence"]


# From per-token terms to one number


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values`` (B, T) where ``mask`` holds.

    Masked positions may hold anything, NaN included.
    """
    return torch.where(mask, values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` (B, T) over the positions where ``mask`` holds; 0 where there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the response of each sequence: (B, T) -> (B,)."""
    return torch.where(mask, values, 0).sum(dim=1)


def aggregate(values: Tensor, mask: Tensor, totals: StepTotals, mode: Aggregation) -> Tensor:
    """This micro-batch's share of the step's loss (algorithms.md §6).

    ``token``: sum over tokens / tokens of the step. ``sequence``: mean over each sequence's tokens,
    then sum over sequences / sequences of the step. Shares of all micro-batches add up to the loss
    of the full batch.
    """
    if mode == "token":
        return masked_sum(values, mask) / totals.tokens
    means = sequence_sums(values, mask) / mask.sum(dim=1).clamp(min=1)
    return means.sum() / totals.rows


def step_totals(mask: Tensor) -> StepTotals:
    """The divisors of a step whose response mask (B, T) is ``mask``."""
    return StepTotals(mask.shape[0], int(mask.sum()))


# Importance weights


def ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``rho = exp(log pi - log pi_old)`` at response tokens, 1 elsewhere: (B, T) -> (B, T).

    Masked differences are zeroed before the exponential, so padding can neither overflow nor poison
    a gradient.
    """
    return torch.where(mask, logprobs - old_logprobs, 0).exp()


def sequence_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """One ratio for all tokens of a reply, ``exp(mean over its tokens of log pi - log pi_old)``.

    Shapes: (B, T) -> (B, T).

    A reply's reward is of the reply as a whole, and so is this ratio. Source: Zheng et al. 2025,
    "Group Sequence Policy Optimization", equation 7; 1 at masked positions.
    """
    difference = torch.where(mask, logprobs - old_logprobs, 0)
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = difference.sum(dim=1, keepdim=True) / tokens
    return torch.where(mask, mean.exp(), 1)


def with_fixed_reference(experience: Experience) -> Experience:
    """Take the ratio to the reference in place of the policy that sampled.

    The switch is ``ppo.surrogate.fixed_reference``.

    The paper's ablation (section 5.3.2), as if the buffer were infinitely old. The replies are
    still the current policy's own, so nothing is corrected for old samples: together with the
    ratio's clip it is a trust region at SFT.
    """
    return replace(experience, old_logprobs=experience.ref_logprobs)


def initial_ratio(experience: Experience) -> float:
    """Mean ratio before any step, where the policy scored.

    1 up to rounding, except with the fixed reference.
    """
    ratio = ratios(experience.trainer_logprobs, experience.old_logprobs, experience.scored_mask)
    return float(masked_mean(ratio, experience.scored_mask))


def truncated_weights(trainer: Tensor, sampler: Tensor, mask: Tensor, cap: float) -> Tensor:
    """``min(exp(log pi_old - log mu), C)`` at response tokens, 1 elsewhere.

    Shapes: (B, T) -> (B, T), without gradient.

    Truncated importance sampling between sampler and trainer, two policies where their rounding
    differs: replies come from the sampler's distribution ``mu``, while PPO's gradient takes them
    for samples of the trainer's ``pi_old``. The cap C bounds the variance. The weight is a constant
    of the loss and has nothing to do with the ratio ``pi / pi_old`` that is clipped. Source: Yao et
    al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

    Args:
        trainer: The trainer's log-probabilities of the sampled tokens before the update,
            ``log pi_old``.
        sampler: The sampler's, ``log mu``.
        mask: Response tokens.
        cap: C.
    """
    return ratios(trainer.detach(), sampler.detach(), mask).clamp(max=cap)


def correction_cap(
    config: ImportanceSamplingCorrectionConfig, precision: Precision
) -> float | None:
    """The cap of this run's :func:`truncated_weights`, or None where the loss is not corrected.

    In mode ``auto`` float32 and float64 runs are not: there sampler and trainer agree up to the
    last digits. In mode ``ratio`` the ratio itself is to the sampler.
    """
    if config.mode in ("never", "ratio"):
        return None
    if config.mode == "auto" and precision in ("float32", "float64"):
        return None
    return config.cap


# The policy's surrogate


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    clip: float | None,
    dual_clip: float | None = None,
    clip_high: float | None = None,
) -> Tensor:
    """``-min(rho A, clip(rho, 1-eps, 1+eps) A)``: (B, T) -> (B, T).

    Source: Schulman et al. 2017, equation 7.

    ``clip=None`` is the unclipped surrogate. ``clip_high`` is the upper epsilon, where it is
    another: unlikely tokens may then gain more in a step (Yu et al. 2025, "DAPO", section 3.1).
    ``dual_clip`` c > 1 bounds it where A < 0: ``-max(min(..), c A)`` (Ye et al. 2020, equation 5).
    """
    objective = ratio * advantages
    if clip is not None:
        upper = clip if clip_high is None else clip_high
        near = ratio.clamp(1 - clip, 1 + upper)
        objective = torch.minimum(objective, near * advantages)
    if dual_clip is not None:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective


def clip_fraction_mask(
    ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None
) -> Tensor:
    """Where the clip takes the gradient away (the clipped branch is the smaller one).

    Shapes: (B, T) -> bool (B, T).
    """
    upper = clip if clip_high is None else clip_high
    above = (ratio > 1 + upper) & (advantages > 0)
    below = (ratio < 1 - clip) & (advantages < 0)
    return above | below


def penalty_surrogate(ratio: Tensor, advantages: Tensor, weight: float) -> Tensor:
    """PPO-penalty: ``-rho A + weight * KL(pi_old || pi)``: (B, T) -> (B, T).

    Source: paper, equation 11.

    The tokens come from pi_old, so ``rho - 1 - log rho`` is an unbiased estimate of that KL, and so
    is its gradient.
    """
    return -ratio * advantages + weight * old_policy_kl(ratio)


def old_policy_kl(ratio: Tensor) -> Tensor:
    """Never-negative estimate of KL(pi_old || pi) per token, ``rho - 1 - log rho``.

    Shapes: (B, T) -> (B, T).
    """
    return ratio - 1 - ratio.log()


def entropy_sign(config: EntropyConfig, mean_entropy: float | None) -> float:
    """Sign of the entropy in the loss.

    -1 for a bonus ``-w * H``, that of ``H - target`` for ``w * |H - target|``.

    The target form is MOSS-RLHF's (paper, section 5.3.2); both are off in PPO-max. |H - target| is
    a function of the mean over the whole step, so that ``mean_entropy`` (nats per token, None where
    no one measured it) must be known before the step's first micro-batch.
    """
    if config.kind == "target" and mean_entropy is not None:
        return 1.0 if mean_entropy > config.target else -1.0
    return -1.0 if config.kind == "bonus" else 0.0


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's loss in one optimiser step: corrected surrogate, KL in the loss, entropy.

    Attributes:
        config: The switches.
        reference: The frozen SFT policy; read only for an exact KL in the loss.
        kl_coef: Weight of the KL penalty, if ``config`` places it in the loss.
        entropy_sign: See :func:`entropy_sign`.
        correction_cap: See :func:`correction_cap`.
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
        if self.kl_in_loss and self.config.kl.estimator == "full":
            return self.reference
        return None

    def loss(
        self, outputs: Mapping[str, Tensor], batch: Experience, totals: StepTotals
    ) -> tuple[Tensor, dict[str, Scalar]]:
        """One micro-batch's share in the loss and in metrics.

        ``outputs`` are what the current policy says of its tokens (b, t).

        The advantages of ``batch`` are normalised and clipped already.
        """
        switches = self.config.surrogate
        mask = batch.response_mask
        advantages = batch.advantages

        def share(values: Tensor) -> Scalar:
            return device_scalar(masked_sum(values, mask)) / totals.tokens

        of_tokens = ratios(outputs["logprobs"], batch.old_logprobs, mask)
        ratio = of_tokens
        if switches.ratio == "sequence":
            ratio = sequence_ratios(outputs["logprobs"], batch.old_logprobs, mask)
        if switches.kind == "penalty":
            terms = penalty_surrogate(ratio, advantages, switches.penalty)
        else:
            terms = clipped_surrogate(
                ratio, advantages, switches.clip, switches.dual_clip, switches.clip_high
            )
        correction: dict[str, Scalar] = {}
        if self.correction_cap is not None:
            weights = truncated_weights(
                batch.policy_logprobs, batch.sampler_logprobs, mask, self.correction_cap
            )
            terms = weights * terms
            is_capped = weights >= self.correction_cap
            correction["importance_sampling_ratio_mean"] = share(weights)
            correction["importance_sampling_ratio_capped"] = share(is_capped.float())
        if self.kl_in_loss:
            terms = terms + self.kl_coef * self._kl(outputs, batch)
        loss = aggregate(terms, mask, totals, switches.aggregation)
        ratio = ratio.detach()
        metrics: dict[str, Scalar] = {
            "policy_loss": device_scalar(loss),
            "ratio_mean": share(ratio),
            "ratio_max": device_scalar(ratio.max()),
            "old_policy_kl": share(old_policy_kl(of_tokens.detach())),
        }
        if switches.kind == "clip" and switches.clip is not None:
            clipped = clip_fraction_mask(ratio, advantages, switches.clip, switches.clip_high)
            metrics["clip_fraction"] = share(clipped.float())
        if "entropy" in outputs:
            entropy = masked_sum(outputs["entropy"], mask)
            loss = loss + self.entropy_weight * entropy / totals.tokens
        return loss, metrics | correction

    def _kl(self, outputs: Mapping[str, Tensor], batch: Experience) -> Tensor:
        """KL of the current policy to the reference (b, t); masked positions may hold anything."""
        estimator = self.config.kl.estimator
        if estimator == "full":
            return outputs["full_kl"]
        masked = torch.where(batch.response_mask, outputs["logprobs"], batch.ref_logprobs)
        return kl_estimate(masked, batch.ref_logprobs, estimator)


# The critic


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """``max((V-R)^2, (clip(V, V_old-eps, V_old+eps)-R)^2) / 2``, unclipped with ``clip=None``.

    Shapes: (B, T) -> (B, T).
    """
    squared = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        squared = torch.maximum(squared, (near - returns).square())
    return squared / 2


def value_clip_mask(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Where the clipped branch of the value loss is the larger one, so that it has no gradient.

    Shapes: (B, T) three times -> bool (B, T).

    A value that moved no further than the clip is not clipped, however the two branches are
    rounded.
    """
    moved = values - old_values
    near = old_values + moved.clamp(-clip, clip)
    is_larger = (near - returns).square() > (values - returns).square()
    return (moved.abs() > clip) & is_larger


@dataclass(frozen=True)
class ValueObjective:
    """The critic's loss in one optimiser step.

    Attributes:
        clip: Half-width of the value clip; None for no clip.
        weight: Weight of the loss; it matters where backbone or gradient norm is shared with the
            policy.
        aggregation: How per-token terms become one number.
    """

    clip: float | None
    weight: float = 1.0
    aggregation: Aggregation = "token"

    def loss(
        self, outputs: Tensor, batch: Experience, totals: StepTotals
    ) -> tuple[Tensor, dict[str, Scalar]]:
        """One micro-batch's weighted share in the loss, and its share in metrics.

        ``outputs`` are the current values (b, t).
        """
        mask = batch.response_mask
        old = batch.values
        returns = batch.returns
        terms = value_loss(outputs, old, returns, self.clip)
        loss = aggregate(terms, mask, totals, self.aggregation)
        clip_fraction: Scalar = 0.0
        if self.clip is not None:
            is_clipped = value_clip_mask(outputs.detach(), old, returns, self.clip)
            clipped = masked_sum(is_clipped.float(), mask)
            clip_fraction = device_scalar(clipped) / totals.tokens
        metrics = {"value_loss": device_scalar(loss), "value_clip_fraction": clip_fraction}
        return self.weight * loss, metrics


# PPO-ptx and the step


def ptx_loss_sum(
    model: PreTrainedModel,
    texts: Sequence[tuple[list[int], list[int]]],
    pad_id: int,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """Summed cross-entropy of the target tokens of texts, a scalar (Ouyang et al. 2022).

    A text is ``(context ids, target ids)``.

    No sampling temperature: this is language modelling.
    """
    ids, mask = right_pad([context + target for context, target in texts], pad_id)
    ids = ids.to(model.device)
    mask = mask.to(model.device)
    lengths = [len(context) for context, _ in texts]
    contexts = torch.tensor(lengths, device=ids.device).unsqueeze(1)
    positions = torch.arange(ids.shape[1], device=ids.device)
    is_target = mask.bool() & (positions >= contexts)
    counted = is_target[:, 1:]
    select = torch.nn.functional.pad(counted, (0, 1))
    logits = selected_logits(model, ids, mask, select)
    targets = ids[:, 1:][counted]
    return chunked_cross_entropy(logits, targets, 1, logits_bytes)


def clip_and_step(
    engines: Mapping[str, Engine], norm: Literal["separate", "joint"], max_norm: float | None
) -> dict[str, StepResult]:
    """Clip gradients by their global norm, and step every engine (PPO-max).

    The clip is ``g * min(1, max_norm / ||g||)``.

    Gradients are scaled in the engine's step, since a sharding engine alone knows the norm over all
    ranks; here is decided whose norm counts.

    Args:
        engines: The engines by name.
        norm: ``separate`` clips each engine's gradients by their own norm; ``joint`` takes one norm
            over all, as MOSS-RLHF does, which puts policy and critic into one optimiser.
        max_norm: The bound of the joint norm; separate norms are bounded by each engine's own.

    Returns:
        The results by the engines' names. A step whose norm is not finite was skipped.
    """
    if norm == "joint":
        results = joint_step(list(engines.values()), max_norm)
        return dict(zip(engines, results, strict=True))
    return {name: engine.step() for name, engine in engines.items()}

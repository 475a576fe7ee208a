"""One PPO update: epochs of minibatch steps of policy and critic on one rollout (algorithms.md §6)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.errors import TrainingPaused
from rlhf_core.models.precision import matmul_precision
from rlhf_core.ppo.advantages.estimate import normalize_and_clip_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.learners.actor_critic_pair import ActorCriticPair
from rlhf_core.ppo.losses.entropy import entropy_sign
from rlhf_core.ppo.losses.grad_clip import clip_and_step
from rlhf_core.ppo.losses.importance_sampling import ratios
from rlhf_core.ppo.losses.loss_reduction import StepSize, masked_sum
from rlhf_core.ppo.losses.policy_loss import PolicyMetrics, PolicyObjective, old_policy_kl
from rlhf_core.ppo.losses.ptx import PtxData, accumulate_ptx_gradient
from rlhf_core.ppo.losses.truncated_importance_sampling import correction_cap
from rlhf_core.ppo.losses.value_loss import ValueMetrics, ValueObjective
from rlhf_core.ppo.metrics import MetricRecord, mean
from rlhf_core.runtime import distributed
from rlhf_core.training.device_scalars import Scalar, device_scalar, read_scalars
from rlhf_core.training.engine import StepResult
from rlhf_core.training.engine.base import MAX_NONFINITE_IN_A_ROW
from rlhf_core.training.rng import derive_seed


@dataclass(frozen=True)
class Learner:
    """What stays the same from update to update.

    Attributes:
        config: The switches.
        pair: Policy and critic with their engines.
        reference: The frozen SFT policy.
        ptx: Texts of the ptx loss, if there is one.
    """

    config: PpoConfig
    pair: ActorCriticPair
    reference: PreTrainedModel
    ptx: PtxData | None = None

    @property
    def value_objective(self) -> ValueObjective:
        """The critic's loss in this run."""
        config = self.config
        return ValueObjective(config.value_clip, config.vf_loss_weight, config.surrogate.aggregation)


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step. ``policy`` is None in a step of the critic alone, after an early stop."""

    policy: PolicyMetrics | None
    value: ValueMetrics | None
    results: dict[str, StepResult]
    ptx_loss: float | None = None
    padding_share_update: float | None = None

    def as_metrics(self) -> dict[str, float]:
        """Return all values by name."""
        metrics = self.policy.as_metrics() if self.policy is not None else {}
        if self.value is not None:
            metrics |= self.value.as_metrics()
        if self.ptx_loss is not None:
            metrics["ptx_loss"] = self.ptx_loss
        if self.padding_share_update is not None:
            metrics["padding_share_update"] = self.padding_share_update
        metrics |= {f"{name}_grad_norm": result.grad_norm for name, result in self.results.items()}
        return metrics | {f"{name}_lr": result.lr for name, result in self.results.items()}


@dataclass(frozen=True)
class UpdateMetrics:
    """All steps of one update.

    Attributes:
        steps: The steps that were made.
        early_stopped: Whether the target KL ended the policy's steps.
        paused: Why the update was broken off, if steps kept being non-finite.
    """

    steps: tuple[StepMetrics, ...]
    early_stopped: bool = False
    paused: TrainingPaused | None = None

    def as_metrics(self) -> dict[str, float]:
        """Return means over the steps, largest values under names that end in ``_max``, and counts."""
        if self.paused is not None:
            skipped = float(MAX_NONFINITE_IN_A_ROW)
            return {"nonfinite_in_a_row": skipped, "skipped_steps": skipped}
        counts = {
            "steps": float(sum(step.policy is not None for step in self.steps)),
            "skipped_steps": float(sum(result.skipped for step in self.steps for result in step.results.values())),
            "early_stopped": float(self.early_stopped),
        }
        return mean([step.as_metrics() for step in self.steps]) | counts


def update(learner: Learner, experience: Experience, kl_coef: float, iteration: int) -> UpdateMetrics:
    """Make all optimiser steps on one rollout.

    A step whose gradient is not finite is skipped by the engine; three in a row break the update off. A step before
    which the policy has moved further than ``target_kl_early_stop`` ends the policy's steps: the critic goes on alone,
    and the learning rates follow the planned steps.

    Args:
        learner: The models and switches.
        experience: The rollout, with advantages.
        kl_coef: Weight of the KL penalty; read if it is placed in the loss.
        iteration: Number of the iteration from 0, which fixes every order and ptx batch.
    """
    config, steps, early_stopped = learner.config, list[StepMetrics](), False
    seed, limit = derive_seed(config.seed, "ppo", "minibatches"), config.target_kl_early_stop
    try:
        for epoch in range(config.epochs):
            number = iteration * config.epochs + epoch
            for part, minibatch in enumerate(experience.minibatches(config.minibatches, seed, number)):
                before = None
                if not early_stopped and (limit is not None or config.entropy.kind == "target"):
                    before = measure_minibatch(learner.pair, minibatch)
                    early_stopped = limit is not None and before.old_policy_kl > limit
                if early_stopped:
                    steps.append(step_critic(learner, minibatch))
                else:
                    sign = entropy_sign(config.entropy, before.entropy if before is not None else None)
                    step = number * config.minibatches + part
                    steps.append(step_both(learner, minibatch, kl_coef, sign, step))
    except TrainingPaused as paused:
        return UpdateMetrics(tuple(steps), early_stopped, paused)
    return UpdateMetrics(tuple(steps), early_stopped)


def step_both(learner: Learner, minibatch: Experience, kl_coef: float, sign: float, step: int) -> StepMetrics:
    """Make one optimiser step of policy and critic.

    Args:
        learner: The models and switches.
        minibatch: The rows of the step.
        kl_coef: Weight of the KL penalty; read if it is placed in the loss.
        sign: Sign of the entropy in the loss; see :func:`~rlhf_core.ppo.losses.entropy.entropy_sign`.
        step: Number of the step from 0, which fixes the ptx batch.
    """
    config, pair, ptx_loss = learner.config, learner.pair, None
    policy, value = accumulate_gradients(learner, minibatch, kl_coef, sign)
    if learner.ptx is not None and config.ptx.weight > 0:
        engine, weight = pair.engines["policy"], config.ptx.weight
        size = config.ptx.micro_batch_size or config.micro_batch_size
        ptx_loss = accumulate_ptx_gradient(engine, pair.policy, learner.ptx, step, weight, size, pair.scorer.limit)
    results = clip_and_step(pair.engines, config.gradient_norm, config.policy_optimizer.max_grad_norm)
    return StepMetrics(policy, value, results, ptx_loss, pair.limits.padding_share(minibatch.batch))


def accumulate_gradients(
    learner: Learner, minibatch: Experience, kl_coef: float, sign: float
) -> tuple[PolicyMetrics, ValueMetrics | None]:
    """Backward passes of the losses of policy and critic over a minibatch, whose advantages are normalised here."""
    config, pair = learner.config, learner.pair
    advantages = normalize_and_clip_advantages(minibatch.advantages, minibatch.response_mask, config.advantage)
    minibatch = replace(minibatch, advantages=advantages)
    cap = correction_cap(config.importance_sampling_correction, matmul_precision(pair.policy))
    objective = PolicyObjective(config, learner.reference, kl_coef, sign, cap)
    return pair.accumulate_gradients(minibatch, objective, learner.value_objective)


def step_critic(learner: Learner, minibatch: Experience) -> StepMetrics:
    """Make one optimiser step of the critic, where it can be trained alone; the policy's schedule advances with it."""
    config, pair = learner.config, learner.pair
    pair.engines["policy"].pass_over_step()
    value = pair.accumulate_value_gradients(minibatch, learner.value_objective)
    results = clip_and_step(pair.critic_engines, config.gradient_norm, config.policy_optimizer.max_grad_norm)
    return StepMetrics(None, value, results)


@dataclass(frozen=True)
class MinibatchMeasurement(MetricRecord):
    """The current policy on a minibatch, by a pass without gradient: nats per token."""

    old_policy_kl: float
    entropy: float


@torch.no_grad()
def measure_minibatch(pair: ActorCriticPair, minibatch: Experience) -> MinibatchMeasurement:
    """Measure a whole minibatch, to decide about its step before any micro-batch of it is differentiated."""
    shares: list[dict[str, Scalar]] = []
    weights: list[float] = []
    for batch, weight in minibatch.micro_batches(pair.limits):
        statistics = pair.score_tokens(batch.batch, entropies=True)
        assert statistics.entropy is not None
        ratio = ratios(statistics.logprobs, batch.old_logprobs, batch.response_mask)
        terms = {"kl": old_policy_kl(ratio), "entropy": statistics.entropy}
        shares.append({name: device_scalar(masked_sum(term, batch.response_mask)) for name, term in terms.items()})
        weights.append(weight)
    sums = {"kl": 0.0, "entropy": 0.0}
    for share, weight in zip(read_scalars(shares), weights, strict=True):
        sums = {name: sums[name] + weight * value for name, value in share.items()}
    tokens = StepSize.of(minibatch.response_mask).tokens
    sums = distributed.reduce_metrics(sums)
    return MinibatchMeasurement(sums["kl"] / tokens, sums["entropy"] / tokens)

"""One PPO update: epochs of minibatch steps of policy and critic on one rollout (algorithms.md §6)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core import distributed
from rlhf_core.config.ppo import EntropyConfig, PpoConfig
from rlhf_core.models.actor_critic import ActorCritic, policy_weights
from rlhf_core.ppo.advantages import normalize_and_clip_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.kl import full_kl, kl_estimate
from rlhf_core.ppo.loss_reduction import StepSize, aggregate, masked_mean, masked_sum
from rlhf_core.ppo.policy_loss import clip_fraction_mask, old_policy_kl, ratios, surrogate
from rlhf_core.ppo.ptx import PtxData, accumulate_ptx_gradient
from rlhf_core.ppo.value_loss import ValueSettings, accumulate_value_gradient, value_share
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import (
    Tokens,
    TokenScorer,
    entropy,
    gather_logprobs,
    policy_and_values,
    response_log_distribution,
    shared_micro_batches,
)
from rlhf_core.training.engine import Engine, joint_step
from rlhf_core.training.rng import derive_seed


@dataclass(frozen=True)
class Learner:
    """Everything that stays the same from update to update. ``reference`` is read only for an exact KL in the loss.

    With a shared backbone ``critic`` is an ``ActorCritic`` over ``policy``, and one engine trains both.
    """

    config: PpoConfig
    sampling: Sampling
    policy: PreTrainedModel
    policy_engine: Engine
    critic: TokenScorer
    critic_engine: Engine
    reference: PreTrainedModel
    ptx: PtxData | None

    @property
    def engines(self) -> dict[str, Engine]:
        """By name: ``policy`` and ``critic``, or ``policy`` alone where it trains the value head too."""
        shared = self.critic_engine is self.policy_engine
        return {"policy": self.policy_engine} | ({} if shared else {"critic": self.critic_engine})

    def policy_weights(self) -> dict[str, Tensor]:
        """The policy's weights by its own names, on the CPU; a value head is no part of it."""
        weights = self.policy_engine.full_weights()
        return policy_weights(weights) if isinstance(self.critic, ActorCritic) else weights

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Inside it every rank holds all weights of all models in training; see ``Engine.gathered_parameters``."""
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.enter_context(engine.gathered_parameters())
            yield

    @property
    def value_settings(self) -> ValueSettings:
        """How this run's value loss is formed."""
        config = self.config
        return ValueSettings(
            config.value_clip, config.vf_loss_weight, config.surrogate.aggregation, config.micro_batch_size
        )


@dataclass
class Figures:
    """Means over the optimiser steps of one update; maxima under names that end in ``_max``; counts."""

    means: dict[str, list[float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"steps": 0, "skipped_steps": 0, "early_stopped": 0})

    def add(self, values: dict[str, float]) -> None:
        """Take in one minibatch."""
        for name, value in values.items():
            if name.endswith("_max"):
                self.maxima[name] = largest(self.maxima.get(name, value), value)
            else:
                self.means.setdefault(name, []).append(value)

    def result(self) -> dict[str, float]:
        """Flat, ready for the history."""
        return {name: sum(values) / len(values) for name, values in self.means.items()} | self.maxima | self.counts


def update(learner: Learner, experience: Experience, coefficient: float, iteration: int) -> dict[str, float]:
    """All optimiser steps on one rollout; ``iteration`` counts from 0 and fixes every order and ptx batch.

    Returns the figures of the update. A step whose gradient is not finite is skipped by the engine and counted here;
    the engine raises ``TrainingPaused`` after three in a row.
    """
    config, figures = learner.config, Figures()
    seed, stopped = derive_seed(config.seed, "ppo", "minibatches"), False
    for epoch in range(config.epochs):
        number = iteration * config.epochs + epoch
        for part, minibatch in enumerate(experience.minibatches(config.minibatches, seed, number)):
            before = None
            if not stopped and (config.target_kl_early_stop is not None or config.entropy.kind == "target"):
                before = measure_minibatch(learner, minibatch)
                stopped = config.target_kl_early_stop is not None and before.old_policy_kl > config.target_kl_early_stop
            if stopped:
                _step_of_critic(learner, minibatch, figures)
            else:
                _step(learner, minibatch, coefficient, number * config.minibatches + part, before, figures)
    figures.counts["early_stopped"] = int(stopped)
    return figures.result()


def _step(
    learner: Learner, minibatch: Experience, coefficient: float, step: int, before: MinibatchMeasurement | None,
    figures: Figures,
) -> None:  # fmt: skip
    """One optimiser step of policy and critic."""
    config = learner.config
    direction = _entropy_direction(config.entropy, before)
    found = accumulate_policy_gradient(learner, minibatch, coefficient, direction)
    if learner.ptx is not None and config.ptx.weight > 0:
        found["ptx_loss"] = accumulate_ptx_gradient(
            learner.policy_engine, learner.policy, learner.ptx, step, config.ptx.weight, config.micro_batch_size
        )
    if not isinstance(learner.critic, ActorCritic):
        found |= accumulate_value_gradient(learner.critic_engine, learner.critic, minibatch, learner.value_settings)
    figures.counts["steps"] += 1
    _step_engines(learner, learner.engines, found, figures)


def _step_of_critic(learner: Learner, minibatch: Experience, figures: Figures) -> None:
    """One optimiser step of a separate critic; the policy's schedule goes past the step that it does not make.

    With a shared backbone there is no step: the value loss alone would move the policy on.
    """
    learner.policy_engine.pass_over_step()
    if not isinstance(learner.critic, ActorCritic):
        found = accumulate_value_gradient(learner.critic_engine, learner.critic, minibatch, learner.value_settings)
        _step_engines(learner, {"critic": learner.critic_engine}, found, figures)


def _step_engines(learner: Learner, engines: dict[str, Engine], found: dict[str, float], figures: Figures) -> None:
    if learner.config.gradient_norm == "joint":
        results = joint_step(list(engines.values()), learner.config.policy_optimizer.max_grad_norm)
    else:
        results = [engine.step() for engine in engines.values()]
    figures.counts["skipped_steps"] += sum(result.skipped for result in results)
    named = dict(zip(engines, results, strict=True))
    found |= {f"{name}_grad_norm": result.grad_norm for name, result in named.items()}
    figures.add(found | {f"{name}_lr": result.lr for name, result in named.items()})


@dataclass(frozen=True)
class MinibatchMeasurement:
    """What the current policy looks like on a minibatch, found by a pass without gradient."""

    old_policy_kl: float  # nats per token
    entropy: float  # nats per token


@torch.no_grad()
def measure_minibatch(learner: Learner, minibatch: Experience) -> MinibatchMeasurement:
    """Figures of a whole minibatch that decide about its step before any micro-batch of it is differentiated."""
    sums = {"kl": 0.0, "entropy": 0.0}
    for rows, counts in shared_micro_batches(minibatch.attention_mask, learner.config.micro_batch_size):
        batch = minibatch.batch.part(rows)
        log_probabilities = _log_distribution(learner, batch)
        logprobs = gather_logprobs(log_probabilities, batch.response)
        ratio = ratios(logprobs, minibatch.old_logprobs[rows, : batch.width], batch.response_mask)
        sums["kl"] += counts * float(masked_sum(old_policy_kl(ratio), batch.response_mask))
        sums["entropy"] += counts * float(masked_sum(entropy(log_probabilities), batch.response_mask))
    tokens = StepSize.of(minibatch.response_mask).tokens
    sums = distributed.reduce_metrics(sums)
    return MinibatchMeasurement(sums["kl"] / tokens, sums["entropy"] / tokens)


def _log_distribution(learner: Learner, batch: Tokens) -> Tensor:
    """The current policy's, in a pass that its engine knows of: (B, T, V)."""
    return learner.policy_engine.forward(partial(response_log_distribution, learner.policy, batch, learner.sampling))


def _entropy_direction(settings: EntropyConfig, before: MinibatchMeasurement | None) -> float:
    """Sign of the entropy in the loss: -1 for a bonus, that of (mean entropy - target) for a target.

    |H - target| is a function of the mean over the whole step, so its sign must be known before the micro-batches.
    """
    if settings.kind == "target" and before is not None:
        return 1.0 if before.entropy > settings.target else -1.0
    return -1.0 if settings.kind == "bonus" else 0.0


def accumulate_policy_gradient(
    learner: Learner, minibatch: Experience, coefficient: float, entropy_direction: float
) -> dict[str, float]:
    """Backward pass of the policy's loss over a minibatch, in micro-batches that never change the gradient.

    With a shared backbone the weighted value loss is in it, computed from the same pass.
    """
    config = learner.config
    size = StepSize.of(minibatch.response_mask)
    advantages = normalize_and_clip_advantages(minibatch.advantages, minibatch.response_mask, config.advantage)
    found: dict[str, float] = {"ratio_max": 0.0}
    if isinstance(learner.critic, ActorCritic):
        found |= {"value_loss": 0.0, "value_clip_fraction": 0.0}
    for rows, counts in shared_micro_batches(minibatch.attention_mask, config.micro_batch_size):
        batch = minibatch.batch.part(rows)
        log_probabilities, values = _forward(learner, batch)
        logprobs = gather_logprobs(log_probabilities, batch.response)
        mask, width = batch.response_mask, batch.width
        ratio = ratios(logprobs, minibatch.old_logprobs[rows, :width], mask)
        terms = surrogate(ratio, advantages[rows, :width], config.surrogate)
        if config.kl.placement == "loss" and coefficient > 0:
            terms = terms + coefficient * _kl_term(learner, minibatch.ref_logprobs[rows, :width], batch,
                                                   log_probabilities, logprobs)  # fmt: skip
        loss = aggregate(terms, mask, size, config.surrogate.aggregation)
        total = loss + _entropy_term(log_probabilities, mask, size, entropy_direction * config.entropy.weight)
        if values is not None:
            total = total + value_share(values, minibatch, rows, counts, size, learner.value_settings, found)
        learner.policy_engine.backward(counts * total)
        _collect(found, counts, loss, ratio.detach(), advantages[rows, :width], mask, size, config)
    return distributed.reduce_metrics(found)


def _forward(learner: Learner, batch: Tokens) -> tuple[Tensor, Tensor | None]:
    """The current policy's log-distribution (B, T, V), and with a shared backbone the values (B, T)."""
    if isinstance(learner.critic, ActorCritic):
        return learner.policy_engine.forward(partial(policy_and_values, learner.critic, batch, learner.sampling))
    return _log_distribution(learner, batch), None


def _entropy_term(log_probabilities: Tensor, mask: Tensor, size: StepSize, weight: float) -> Tensor | float:
    """``weight * H`` of this micro-batch, with H the mean over the tokens of the step."""
    return weight * masked_sum(entropy(log_probabilities), mask) / size.tokens if weight else 0.0


def _kl_term(
    learner: Learner, ref_logprobs: Tensor, batch: Tokens, log_probabilities: Tensor, logprobs: Tensor
) -> Tensor:
    """KL of the current policy to the reference as a loss term (B, T); masked positions may hold anything."""
    estimator = learner.config.kl.estimator
    if estimator != "full":
        return kl_estimate(torch.where(batch.response_mask, logprobs, ref_logprobs), ref_logprobs, estimator)
    with torch.no_grad():
        reference = response_log_distribution(learner.reference, batch, learner.sampling)
    return full_kl(log_probabilities, reference)


def _collect(
    found: dict[str, float], counts: float, loss: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor,
    size: StepSize, config: PpoConfig,
) -> None:  # fmt: skip
    """Add one micro-batch's share of the step's figures."""
    clip = config.surrogate.clip if config.surrogate.kind == "clip" else None
    shares = {
        "policy_loss": float(loss.detach()),
        "ratio_mean": float(masked_sum(ratio, mask)) / size.tokens,
        "old_policy_kl": float(masked_sum(old_policy_kl(ratio), mask)) / size.tokens,
    }
    if clip is not None:
        shares["clip_fraction"] = (
            float(masked_sum(clip_fraction_mask(ratio, advantages, clip).float(), mask)) / size.tokens
        )
    for name, value in shares.items():
        found[name] = found.get(name, 0.0) + counts * value
    found["ratio_max"] = largest(found["ratio_max"], float(ratio.max()))


def largest(first: float, second: float) -> float:
    """The larger of two numbers, NaN if one of them is: ``max`` would drop it or not by their order."""
    return second if second > first or math.isnan(second) else first


def first_ratio(experience: Experience) -> float:
    """Mean ratio before any step: 1 up to rounding, except with the fixed reference as behaviour policy."""
    ratio = ratios(experience.policy_logprobs, experience.old_logprobs, experience.response_mask)
    return float(masked_mean(ratio, experience.response_mask))

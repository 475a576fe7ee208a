"""One PPO update: the optimiser steps of one rollout (algorithms.md §6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.batches import batch_at, passes, rows_by_category_share
from rlhf_core.data.tables import TableRows
from rlhf_core.data.tokens import TokenTable
from rlhf_core.errors import DataError, TrainingPaused
from rlhf_core.models.heads import ActorCritic
from rlhf_core.models.precision import matmul_precision
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import normalize_and_clip_advantages
from rlhf_core.ppo.experience import Experience, MicroExperience
from rlhf_core.ppo.losses import (
    PolicyObjective,
    ValueObjective,
    clip_and_step,
    correction_cap,
    entropy_sign,
    masked_sum,
    old_policy_kl,
    ptx_loss_sum,
    ratios,
    step_totals,
)
from rlhf_core.sampling.token_scoring import Tokens, logits_and_values, response_logits
from rlhf_core.training.engine.base import MAX_NONFINITE_IN_A_ROW
from rlhf_core.training.passes import (
    Scalar,
    Share,
    device_scalar,
    gradient_shares,
    mean_of_steps,
    run_side_by_side,
    totals_of_steps,
)
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
    def models(self) -> tuple[object, ...]:
        """All models that a step may call."""
        kl = self.config.kl
        if kl.placement == "loss" and kl.estimator == "full":
            return (*self.pair.models, self.reference)
        return self.pair.models

    @property
    def value_objective(self) -> ValueObjective:
        """The critic's loss in this run."""
        config = self.config
        return ValueObjective(
            config.value_clip, config.vf_loss_weight, config.surrogate.aggregation
        )


@dataclass(frozen=True)
class UpdateResult:
    """All steps of one update.

    Attributes:
        metrics: Means over the steps, largest values under names that end in ``_max``, and counts.
        paused: Why the update was broken off, if steps kept being non-finite.
    """

    metrics: dict[str, float]
    paused: TrainingPaused | None = None


def update(
    learner: Learner, experience: Experience, kl_coef: float, iteration: int
) -> UpdateResult:
    """Make all optimiser steps on one rollout.

    A step whose gradient is not finite is skipped by the engine; three in a row break the update
    off. A step before which the policy has moved further than ``target_kl_early_stop`` ends the
    policy's steps: a critic of its own goes on alone, and the learning rates follow the planned
    steps.

    Args:
        learner: The models and switches.
        experience: The rollout, with advantages.
        kl_coef: Weight of the KL penalty; read if it is placed in the loss.
        iteration: Number of the iteration from 0, which fixes every order and ptx batch.
    """
    config = learner.config
    pair = learner.pair
    limit = config.target_kl_early_stop
    seed = derive_seed(config.seed, "ppo", "minibatches")
    early_stopped = False
    policy_steps = 0
    skipped = 0
    critic_alone = {name: engine for name, engine in pair.engines.items() if name == "critic"}
    # Of each step: the losses of its passes, on the device until all steps are made, and what the
    # host knows.
    shares = list[list[Share]]()
    known = list[dict[str, float]]()
    try:
        for epoch in range(config.epochs):
            number = iteration * config.epochs + epoch
            for part, minibatch in enumerate(
                experience.minibatches(config.minibatches, seed, number)
            ):
                before = dict[str, float]()
                step = list[Share]()
                of_host = dict[str, float]()
                if not early_stopped and (limit is not None or config.entropy.kind == "target"):
                    before = measure_minibatch(pair, minibatch)
                    early_stopped = limit is not None and before["old_policy_kl"] > limit
                engines = critic_alone if early_stopped else pair.engines
                if early_stopped:
                    pair.engines["policy"].pass_over_step()
                    if engines:
                        step = pair.accumulate_value_gradients(minibatch, learner.value_objective)
                else:
                    sign = entropy_sign(config.entropy, before.get("entropy"))
                    tasks = gradient_tasks(learner, minibatch, kl_coef, sign)
                    for shares_of_model in run_side_by_side(*tasks, models=learner.models):
                        step.extend(shares_of_model)
                    if learner.ptx is not None and config.ptx.weight > 0:
                        step += accumulate_ptx_gradient(learner, number * config.minibatches + part)
                    of_host["padding_share_update"] = pair.limits.padding_share(minibatch.batch)
                    policy_steps += 1
                max_norm = config.policy_optimizer.max_grad_norm
                results = clip_and_step(engines, config.gradient_norm, max_norm)
                for name, result in results.items():
                    skipped += result.skipped
                    of_host[f"{name}_grad_norm"] = result.grad_norm
                for name, result in results.items():
                    of_host[f"{name}_lr"] = result.lr
                shares.append(step)
                known.append(of_host)
    except TrainingPaused as paused:
        skips = float(MAX_NONFINITE_IN_A_ROW)
        return UpdateResult({"nonfinite_in_a_row": skips, "skipped_steps": skips}, paused)
    totals = totals_of_steps(shares)
    steps = [losses | of_host for losses, of_host in zip(totals, known, strict=True)]
    counts = {
        "steps": float(policy_steps),
        "skipped_steps": float(skipped),
        "early_stopped": float(early_stopped),
    }
    return UpdateResult(mean_of_steps(steps) | counts)


def gradient_tasks(
    learner: Learner, minibatch: Experience, kl_coef: float, sign: float
) -> list[Callable[[], list[Share]]]:
    """Return the backward passes of policy and critic over a minibatch.

    Its advantages are normalised here.

    They are independent of each other: one task for each model that has an engine of its own.

    Args:
        learner: The models and switches.
        minibatch: The rows of the step.
        kl_coef: Weight of the KL penalty; read if it is placed in the loss.
        sign: Sign of the entropy in the loss; see :func:`~rlhf_core.ppo.losses.entropy_sign`.
    """
    config = learner.config
    pair = learner.pair
    advantages = normalize_and_clip_advantages(
        minibatch.advantages, minibatch.response_mask, config.advantage
    )
    minibatch = replace(minibatch, advantages=advantages)
    cap = correction_cap(config.importance_sampling_correction, matmul_precision(pair.policy))
    objective = PolicyObjective(config, learner.reference, kl_coef, sign, cap)
    tasks: list[Callable[[], list[Share]]] = [
        partial(accumulate_policy_gradients, pair, minibatch, objective, learner.value_objective)
    ]
    if pair.critic is not None and not isinstance(pair.critic, ActorCritic):
        tasks.append(partial(pair.accumulate_value_gradients, minibatch, learner.value_objective))
    return tasks


def accumulate_policy_gradients(
    pair: ActorCriticPair,
    minibatch: Experience,
    objective: PolicyObjective,
    value_objective: ValueObjective,
) -> list[Share]:
    """Make the backward passes of the policy's loss over a minibatch.

    Its micro-batches never change the gradient.

    With a shared backbone they are those of the sum of both losses.
    """
    totals = step_totals(minibatch.response_mask)
    entropies = objective.entropy_weight != 0
    reference = objective.exact_kl_reference

    def compute(batch: MicroExperience) -> tuple[Tensor, dict[str, Scalar]]:
        tokens = batch.batch
        values = None
        if isinstance(pair.critic, ActorCritic):
            logits, values = logits_and_values(pair.critic, tokens)
        else:
            logits = response_logits(pair.policy, tokens)
        statistics = pair.statistics(logits, tokens, entropies, reference)
        loss, metrics = objective.loss(statistics, batch, totals)
        if values is None:
            return loss, metrics
        value_loss, value_metrics = value_objective.loss(values, batch, totals)
        return loss + value_loss, metrics | value_metrics

    parts = minibatch.micro_batches(pair.limits)
    return gradient_shares(pair.engines["policy"], parts, compute)


@torch.no_grad()
def measure_minibatch(pair: ActorCriticPair, minibatch: Experience) -> dict[str, float]:
    """Measure a whole minibatch without gradients, to decide about its step.

    Returns:
        ``old_policy_kl`` and ``entropy`` of the current policy in nats per token, by a pass without
        gradient.
    """
    shares: list[Share] = []

    def forward(tokens: Tokens) -> dict[str, Tensor]:
        return pair.statistics(response_logits(pair.policy, tokens), tokens, True, None)

    for batch, weight in minibatch.micro_batches(pair.limits):
        statistics = pair.engines["policy"].forward(partial(forward, batch.batch))
        mask = batch.response_mask
        ratio = ratios(statistics["logprobs"], batch.old_logprobs, mask)
        terms = {"old_policy_kl": old_policy_kl(ratio), "entropy": statistics["entropy"]}
        sums = {name: device_scalar(masked_sum(term, mask)) for name, term in terms.items()}
        shares.append((sums, weight))
    tokens = step_totals(minibatch.response_mask).tokens
    totals = totals_of_steps([shares])[0]
    return {name: value / tokens for name, value in totals.items()}


PtxText = tuple[list[int], list[int]]  # context ids, and the target ids that are to be predicted


def ptx_texts(
    table: TokenTable, longest: int | None, shares: Mapping[str, float], seed: int
) -> TableRows[PtxText]:
    """Return a table's texts of at most ``longest`` tokens.

    They are repeated and drawn until categories have their ``shares``.

    Of demonstrations the replies are the targets; plain texts are targets as a whole.
    """
    *before, targets = (table.column(name) for name in table.id_columns)

    def texts(rows: npt.NDArray[np.int64]) -> list[PtxText]:
        drawn: list[PtxText] = []
        for row in rows.tolist():
            context = []
            if before:
                context = list(before[0][row])
            drawn.append((context, list(targets[row])))
        return drawn

    rows = np.arange(len(table))
    if longest is not None:
        lengths = np.sum([column.lengths for column in (*before, targets)], axis=0)
        rows = np.flatnonzero(lengths <= longest)
    if shares:
        parameter = "ppo.ptx.category_shares"
        drawn = rows_by_category_share(
            table.categories(), shares, seed, 0, parameter, rows.tolist()
        )
        rows = np.array(drawn)
    return TableRows(rows, texts)


@dataclass(frozen=True)
class PtxData:
    """Texts, of which only the targets count; plain text has an empty context."""

    sequences: Sequence[PtxText] | ConcatDataset[PtxText]
    batch_size: int
    seed: int
    pad_id: int

    def __post_init__(self) -> None:
        texts = (self.sequences[number] for number in range(len(self.sequences)))
        if not any(context or len(target) > 1 for context, target in texts):
            raise DataError(
                "there is no text for the ptx loss; set ppo.ptx.weight to 0 or ppo.ptx.data to another set"
            )

    def batch(self, step: int) -> list[PtxText]:
        """The texts of optimiser step ``step``, a function of (seed, step) alone."""
        rows = batch_at(len(self.sequences), self.batch_size, self.seed, step)
        return [self.sequences[row] for row in rows]


def accumulate_ptx_gradient(learner: Learner, step: int) -> list[Share]:
    """Backward passes of ``weight * CE`` on the texts of optimiser step ``step``.

    CE is in nats per target token.
    """
    config = learner.config
    pair = learner.pair
    data = learner.ptx
    assert data is not None
    texts = sorted(data.batch(step), key=lambda text: len(text[0]) + len(text[1]))
    # The first token of a plain text has nothing before it to be predicted from.
    total = sum(len(target) - (not context) for context, target in texts)
    size = config.ptx.micro_batch_size or config.micro_batch_size or len(texts)

    def compute(part: list[int]) -> tuple[Tensor, dict[str, Scalar]]:
        own = [texts[row] for row in part]
        nats = ptx_loss_sum(pair.policy, own, data.pad_id, pair.logits_bytes)
        loss = nats / max(total, 1)
        return config.ptx.weight * loss, {"ptx_loss": device_scalar(loss)}

    rows = list(range(len(texts)))
    return gradient_shares(pair.engines["policy"], passes(rows, size), compute)

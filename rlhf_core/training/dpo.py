"""Direct preference optimisation (algorithms.md §10).

It trains a policy on pairs, without reward model or sampling.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from rlhf_core.config.model import LoraConfig
from rlhf_core.config.policy import DpoConfig
from rlhf_core.config.reward import CURVE_PAIRS
from rlhf_core.data.batches import TokenisedPair, pair_sequences, passes
from rlhf_core.models.adapters import PeftAdapter, add_adapters, merge_adapters, peft_adapter
from rlhf_core.models.causal_lm import say_router_loss
from rlhf_core.models.forward import LOGITS_BYTES, LazyLogits, selected_logits
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import replacing
from rlhf_core.training import loop
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.examples import (
    LengthBucketedBatches,
    ReplyBatch,
    collate,
    values_of_sequences,
)
from rlhf_core.training.loop import StepReport
from rlhf_core.training.losses import chunked_token_logprobs, ranked_right
from rlhf_core.training.passes import Scalar, accumulate_gradients, device_scalar, read_scalars
from rlhf_core.training.reward.run import Split
from rlhf_core.training.reward.trainer import real_tokens
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

NAME = "dpo"
SCORING_ROWS = 64


def implicit_rewards(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """What DPO's policy rewards: ``beta * log(pi(y | x) / pi_ref(y | x))``: (2, B) twice -> (2, B).

    They are the rewards for which ``policy`` is optimal under a KL penalty of ``beta``, up to a
    constant per prompt.
    """
    return beta * (policy - reference)


def dpo_loss(rewards: Tensor, label_smoothing: float, total: int) -> Tensor:
    """The DPO loss summed over pairs, divided by ``total``: (2, B) -> ().

    It is ``-(1 - e) logsigmoid(r_w - r_l) - e logsigmoid(r_l - r_w)``.

    With ``e`` 0 it is equation 7; above, cDPO (Mitchell 2023): ``e`` of the labels are taken to be
    wrong, so that the loss is smallest at a margin of ``log((1 - e) / e)`` instead of at infinity.
    """
    margins = rewards[0] - rewards[1]
    right, wrong = functional.logsigmoid(margins), functional.logsigmoid(-margins)
    return -((1.0 - label_smoothing) * right + label_smoothing * wrong).sum() / total


def reply_logprobs(
    model: PreTrainedModel, batch: ReplyBatch, logits_bytes: int = LOGITS_BYTES
) -> Tensor:
    """Sum of the log-probabilities of each row's reply tokens: (B,), with gradient.

    At most ``logits_bytes`` of float32 logits exist at a time.
    """
    logits = selected_logits(model, batch.input_ids, batch.attention_mask, batch.select)
    return _sums_by_row(logits, batch, logits_bytes)


def _sums_by_row(logits: LazyLogits, batch: ReplyBatch, logits_bytes: int) -> Tensor:
    values = chunked_token_logprobs(logits, batch.targets, logits_bytes)
    by_position = values.new_zeros(batch.select.shape).masked_scatter(batch.select, values)
    return by_position.sum(dim=1)


def batch_logprobs(
    model: PreTrainedModel,
    pairs: Sequence[TokenisedPair],
    pad: int,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of both replies of each pair, in one pass of 2B rows.

    They are (2, B) in nats, with gradient.

    The second result is the weighted auxiliary loss of the model's routers, where config.json asks
    for it.
    """
    prompts = [pair.prompt for pair in pairs]
    chosen = [pair.chosen for pair in pairs]
    rejected = [pair.rejected for pair in pairs]
    batch = collate([*prompts, *prompts], [*chosen, *rejected], pad).to(model.device)
    logits = selected_logits(
        model, batch.input_ids, batch.attention_mask, batch.select, router_loss=True
    )
    return _sums_by_row(logits, batch, logits_bytes).view(2, -1), logits.router_loss


def all_logprobs(
    model: PreTrainedModel,
    pairs: Sequence[TokenisedPair],
    pad: int,
    size: int = SCORING_ROWS,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """Log-probabilities of all ``pairs`` in float64 (2, B).

    Sequences of similar length pass together, ``size`` at a time.

    A sequence that several pairs share is computed once. Of several ranks each computes its share.
    """
    was_training = model.training
    model.eval()
    sequences = pair_sequences(pairs)
    values = values_of_sequences(
        sequences.distinct,
        lambda batch: reply_logprobs(model, batch, logits_bytes),
        size,
        pad,
        model.device,
    )
    model.train(was_training)
    return values[torch.tensor([sequences.chosen, sequences.rejected])]


def reference_logprobs(
    model: PreTrainedModel,
    pairs: Sequence[TokenisedPair],
    used: Collection[int],
    pad: int,
    file: Path,
    size: int = SCORING_ROWS,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """Log-probabilities of ``pairs`` under the reference (2, B), which never changes.

    They are computed once, of the numbers ``used`` alone (the others are NaN), and read from
    ``file`` on a resume.
    """
    # The other ranks' folders are new at every attempt.
    if distributed.broadcast_from_rank0(file.is_file()):
        saved = load_file(file)["logprobs"].tolist() if distributed.is_rank_zero() else None
        return torch.tensor(distributed.broadcast_from_rank0(saved), dtype=torch.float64)
    rows = sorted(used)
    logprobs = torch.full((2, len(pairs)), torch.nan, dtype=torch.float64)
    logprobs[:, rows] = all_logprobs(model, [pairs[row] for row in rows], pad, size, logits_bytes)
    if distributed.is_rank_zero():
        with replacing(file) as part:
            save_file({"logprobs": logprobs}, part)
    return logprobs


class DpoTask:
    """DPO on preference pairs.

    Its evaluation is how often the implicit reward prefers the chosen reply of held-out pairs.

    Args:
        engine: Trains ``model``.
        model: The policy; it begins as the reference.
        train: Pairs to train on.
        validation: Held-out pairs, of which the first 512 are evaluated.
        references: Log-probabilities of ``train`` and of these under the reference.
        seed: Seed of the order of pairs.
    """

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        train: Sequence[TokenisedPair],
        validation: Sequence[TokenisedPair],
        references: tuple[Tensor, Tensor],
        config: DpoConfig,
        seed: int,
        pad: int,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        self.engine, self.model, self.config, self.pad = engine, model, config, pad
        self.train, self.validation = train, validation[:CURVE_PAIRS]
        self.train_reference, self.validation_reference = references
        self.batches = dpo_batches(train, config, seed)
        self.micro, self.logits_bytes = config.micro_batch_size or config.batch_size, logits_bytes

    def train_step(self, step: int) -> StepReport:
        """Compute the gradients of one optimiser step.

        They are a mean over its pairs, whatever their micro-batches.
        """
        rows = self.batches.at(step)

        def compute(part: list[int]) -> tuple[Tensor, dict[str, Scalar]]:
            pairs = [self.train[row] for row in part]
            policy, router_loss = batch_logprobs(self.model, pairs, self.pad, self.logits_bytes)
            loss, shown = self._loss(
                self.rewards(pairs, policy, self.train_reference[:, part]), len(rows)
            )
            if router_loss is not None:
                loss = loss + router_loss * (len(part) / len(rows))
            return loss, shown

        metrics = accumulate_gradients(self.engine, passes(rows, self.micro), compute)
        return StepReport(metrics, sum(real_tokens(self.train[row]) for row in rows))

    def evaluate(self, model: PreTrainedModel) -> dict[str, float]:
        """Measure loss, accuracy, margin and implicit rewards on at most 512 held-out pairs."""
        rows = scoring_rows(self.config)
        policy = all_logprobs(model, self.validation, self.pad, rows, self.logits_bytes)
        rewards = self.rewards(self.validation, policy, self.validation_reference)
        return read_scalars([self._loss(rewards, len(self.validation))[1]])[0]

    def rewards(self, pairs: Sequence[TokenisedPair], policy: Tensor, reference: Tensor) -> Tensor:
        """Implicit rewards (2, B) of ``pairs`` from log-probabilities (2, B) or means per token."""
        reference = reference.to(policy)
        if self.config.length_normalized:
            chosen = [len(pair.chosen) for pair in pairs]
            rejected = [len(pair.rejected) for pair in pairs]
            lengths = policy.new_tensor([chosen, rejected])
            policy, reference = policy / lengths, reference / lengths
        return implicit_rewards(policy, reference, self.config.beta)

    def _loss(self, rewards: Tensor, total: int) -> tuple[Tensor, dict[str, Scalar]]:
        """The loss, and what the history reports: sums over pairs, divided by ``total``."""
        loss = dpo_loss(rewards, self.config.label_smoothing, total)
        chosen, rejected = rewards.detach()
        return loss, {
            "loss": device_scalar(loss),
            "accuracy": device_scalar(ranked_right(chosen - rejected).sum()) / total,
            "margin": device_scalar((chosen - rejected).sum()) / total,
            "implicit_reward_chosen": device_scalar(chosen.sum()) / total,
            "implicit_reward_rejected": device_scalar(rejected.sum()) / total,
        }


def dpo_batches(
    train: Sequence[TokenisedPair], config: DpoConfig, seed: int
) -> LengthBucketedBatches:
    """The batches of pairs of similar length, a function of the seed."""
    return LengthBucketedBatches(
        [pair.length for pair in train], config.batch_size, derive_seed(seed, NAME, "order")
    )


def scoring_rows(config: DpoConfig) -> int:
    """How many sequences pass at once without gradient.

    They are no more than in a training pass, where that is bounded.
    """
    return 2 * config.micro_batch_size if config.micro_batch_size is not None else SCORING_ROWS


@dataclass(frozen=True)
class DpoRun:
    """A policy trained by DPO.

    Attributes:
        model: The policy, without adapters.
        metrics: What :func:`train_dpo` says of pairs, held-out loss and accuracy, speed and cost.
        history: The records of training, oldest first.
        adapter: What was trained, with ``lora``; it is merged into ``model``.
    """

    model: PreTrainedModel
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    adapter: PeftAdapter | None = None


def train_dpo(
    model: PreTrainedModel,
    pad: int,
    train: Split,
    validation: Split,
    config: DpoConfig,
    seed: int,
    context: RunContext,
    lora: LoraConfig | None = None,
) -> DpoRun:
    """Train ``model`` in place by DPO; what it is at the start is the reference.

    Of several ranks only rank 0 returns.

    An interrupted run resumes from ``context.work``. The reference is in memory only before the
    first step: its log-probabilities of all pairs that will be used are computed then and kept with
    the partial state.
    """
    if lora is not None:
        # Before the reference is read: the policy begins with the rounding of quantised weights.
        add_adapters(model, lora, derive_seed(seed, NAME, "lora"))
    say_router_loss(model, True, NAME)
    config = loop.within_epochs(config, math.ceil(len(train.pairs) / config.batch_size), NAME)
    limit, rows = context.launch.logits_bytes, scoring_rows(config)
    order = dpo_batches(train.pairs, config, seed)
    used: set[int] = set()
    for step in range(config.steps):
        used.update(order.at(step))
    held_out = validation.pairs[:CURVE_PAIRS]
    train_file = context.work / "reference_train.safetensors"
    held_out_file = context.work / "reference_validation.safetensors"
    references = (
        reference_logprobs(model, train.pairs, used, pad, train_file, rows, limit),
        reference_logprobs(model, held_out, range(len(held_out)), pad, held_out_file, rows, limit),
    )

    def task(engine: Engine) -> DpoTask:
        return DpoTask(engine, model, train.pairs, held_out, references, config, seed, pad, limit)

    model, result = loop.train(model, task, config, NAME, seed, context)
    adapter = None
    if lora is not None:
        adapter = peft_adapter(model)
        merge_adapters(model)
    first, last = result.evaluations()[0], result.evaluations()[-1]
    held_out_last = {name: value for name, value in last.items() if name.startswith("validation_")}
    metrics = {
        "steps": config.steps,
        "train_pairs": len(train.pairs),
        "train_pairs_used": len(used),
        "dropped_over_long": train.dropped["over_long"],
        "dropped_identical": train.dropped["identical"],
        "validation_loss_before": first["validation_loss"],
        **held_out_last,
        "train_tokens": result.tokens,
        "train_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "skipped_steps": result.skipped_steps,
    }
    return DpoRun(model, metrics, result.history, adapter)

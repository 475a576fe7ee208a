"""Direct preference optimisation (algorithms.md §10): a policy from pairs, without reward model or sampling."""

from __future__ import annotations

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
from rlhf_core.data.batches import passes
from rlhf_core.data.pairs import TokenisedPair, pair_sequences
from rlhf_core.models.adapters import PeftAdapter, add_adapters, merge_adapters, peft_adapter
from rlhf_core.models.forward import LOGITS_BYTES, selected_logits
from rlhf_core.runtime import distributed
from rlhf_core.training.device_scalars import Scalar, accumulate_gradients, device_scalar, read_scalars
from rlhf_core.training.engine import Engine
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.examples import LengthBucketedBatches, ReplyBatch, collate, values_of_sequences
from rlhf_core.training.loop import Loop, LoopSettings, StepReport
from rlhf_core.training.losses import chunked_token_logprobs
from rlhf_core.training.reward.run import Split
from rlhf_core.training.reward.trainer import real_tokens
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of the chosen and the rejected reply of each pair, in nats (B,)."""

    chosen: Tensor
    rejected: Tensor


@dataclass(frozen=True)
class ImplicitRewards:
    """What DPO's policy rewards: ``beta * log(pi(y | x) / pi_ref(y | x))`` of both replies (B,)."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margins(self) -> Tensor:
        """Reward of the chosen minus that of the rejected reply (B,)."""
        return self.chosen - self.rejected


def implicit_rewards(policy: PairLogprobs, reference: PairLogprobs, beta: float) -> ImplicitRewards:
    """The rewards for which ``policy`` is optimal under a KL penalty of ``beta``, up to a constant per prompt."""
    return ImplicitRewards(
        beta * (policy.chosen - reference.chosen),
        beta * (policy.rejected - reference.rejected),
    )


def dpo_loss(margins: Tensor, label_smoothing: float, total: int) -> Tensor:
    """``-(1 - e) logsigmoid(margin) - e logsigmoid(-margin)`` summed over pairs, divided by ``total``: (B,) -> ().

    With ``e`` 0 it is equation 7; above, cDPO (Mitchell 2023): ``e`` of the labels are taken to be wrong, so that the
    loss is smallest at a margin of ``log((1 - e) / e)`` instead of at infinity.
    """
    right, wrong = functional.logsigmoid(margins), functional.logsigmoid(-margins)
    return -((1.0 - label_smoothing) * right + label_smoothing * wrong).sum() / total


SCORING_ROWS = 64


def reply_logprobs(model: PreTrainedModel, batch: ReplyBatch, logits_bytes: int = LOGITS_BYTES) -> Tensor:
    """Sum of the log-probabilities of each row's reply tokens: (B,), with gradient.

    At most ``logits_bytes`` of float32 logits exist at a time.
    """
    logits = selected_logits(model, batch.input_ids, batch.attention_mask, batch.select)
    values = chunked_token_logprobs(logits, batch.targets, logits_bytes)
    by_position = values.new_zeros(batch.select.shape).masked_scatter(batch.select, values)
    return by_position.sum(dim=1)


def batch_logprobs(
    model: PreTrainedModel, pairs: Sequence[TokenisedPair], pad: int, logits_bytes: int = LOGITS_BYTES
) -> PairLogprobs:
    """Both replies of each pair in one pass of 2B rows: (B,) each, with gradient."""
    prompts = [pair.prompt for pair in pairs]
    replies = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    batch = collate([*prompts, *prompts], replies, pad).to(model.device)
    chosen, rejected = reply_logprobs(model, batch, logits_bytes).chunk(2)
    return PairLogprobs(chosen, rejected)


def all_logprobs(
    model: PreTrainedModel,
    pairs: Sequence[TokenisedPair],
    pad: int,
    size: int = SCORING_ROWS,
    logits_bytes: int = LOGITS_BYTES,
) -> PairLogprobs:
    """Log-probabilities of all ``pairs`` in float64 (B,), in batches of ``size`` sequences of similar length.

    A sequence that several pairs share is computed once. Of several ranks each computes its share.
    """
    was_training = model.training
    model.eval()
    sequences = pair_sequences(pairs)
    values = values_of_sequences(
        sequences.distinct, lambda batch: reply_logprobs(model, batch, logits_bytes), size, pad, model.device
    )
    model.train(was_training)
    return PairLogprobs(values[sequences.chosen], values[sequences.rejected])


def reference_logprobs(
    model: PreTrainedModel,
    pairs: Sequence[TokenisedPair],
    used: Collection[int],
    pad: int,
    file: Path,
    size: int = SCORING_ROWS,
    logits_bytes: int = LOGITS_BYTES,
) -> PairLogprobs:
    """Log-probabilities under the reference, which never changes: computed once, and read from ``file`` on a resume.

    Args:
        model: The reference: the policy before its first step.
        pairs: All pairs.
        used: Numbers of those that training will read; the others are NaN.
        pad: Id of the padding token.
        file: Where the values are kept; it belongs to the partial state of one run.
        size: Sequences of one pass.
        logits_bytes: Bytes of float32 logits that may exist at a time.
    """
    if file.is_file():
        stored = load_file(file)
        return PairLogprobs(stored["chosen"], stored["rejected"])
    rows = sorted(used)
    computed = all_logprobs(model, [pairs[row] for row in rows], pad, size, logits_bytes)
    logprobs = PairLogprobs(*(torch.full((len(pairs),), torch.nan, dtype=torch.float64) for _ in range(2)))
    logprobs.chosen[rows], logprobs.rejected[rows] = computed.chosen, computed.rejected
    if distributed.is_rank_zero():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file({"chosen": logprobs.chosen, "rejected": logprobs.rejected}, part)
        part.replace(file)
    return logprobs


CURVE_PAIRS = 512


class DpoTask:
    """DPO on preference pairs, evaluated by how often the implicit reward prefers the chosen one of held-out pairs.

    Args:
        engine: Trains ``model``.
        model: The policy; it begins as the reference.
        train: Pairs to train on.
        validation: Held-out pairs, of which the first 512 are evaluated.
        references: Log-probabilities of ``train`` and of these under the reference.
        config: Settings.
        seed: Seed of the order of pairs.
        pad: Id of the padding token.
        logits_bytes: Bytes of float32 logits that may exist at a time.
    """

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        train: Sequence[TokenisedPair],
        validation: Sequence[TokenisedPair],
        references: tuple[PairLogprobs, PairLogprobs],
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
        """Compute the gradients of one optimiser step: a mean over its pairs, whatever their micro-batches."""
        rows = self.batches.at(step)

        def compute(part: list[int]) -> tuple[Tensor, dict[str, Scalar]]:
            pairs = [self.train[row] for row in part]
            policy = batch_logprobs(self.model, pairs, self.pad, self.logits_bytes)
            rewards = self._rewards(pairs, policy, self.train_reference, part)
            loss = dpo_loss(rewards.margins, self.config.label_smoothing, len(rows))
            return loss, {"loss": device_scalar(loss), **reward_means(rewards, len(rows))}

        metrics = accumulate_gradients(self.engine, passes(rows, self.micro), compute)
        return StepReport(metrics, sum(real_tokens(self.train[row]) for row in rows))

    def evaluate(self) -> dict[str, float]:
        """``loss``, ``accuracy``, ``margin`` and the implicit rewards on held-out pairs (at most 512)."""
        rows = scoring_rows(self.config)
        policy = all_logprobs(self.model, self.validation, self.pad, rows, self.logits_bytes)
        count = len(self.validation)
        rewards = self._rewards(self.validation, policy, self.validation_reference, range(count))
        loss = device_scalar(dpo_loss(rewards.margins, self.config.label_smoothing, count))
        return read_scalars([{"loss": loss} | reward_means(rewards, count)])[0]

    def _rewards(
        self, pairs: Sequence[TokenisedPair], policy: PairLogprobs, reference: PairLogprobs, rows: Sequence[int]
    ) -> ImplicitRewards:
        """Implicit rewards of ``pairs``, which have the numbers ``rows`` in ``reference``."""
        numbers = torch.tensor(rows)
        frozen = PairLogprobs(
            reference.chosen[numbers].to(policy.chosen), reference.rejected[numbers].to(policy.rejected)
        )
        if self.config.length_normalized:
            lengths = PairLogprobs(
                policy.chosen.new_tensor([len(pair.chosen) for pair in pairs]),
                policy.rejected.new_tensor([len(pair.rejected) for pair in pairs]),
            )
            policy, frozen = per_token(policy, lengths), per_token(frozen, lengths)
        return implicit_rewards(policy, frozen, self.config.beta)


def dpo_batches(train: Sequence[TokenisedPair], config: DpoConfig, seed: int) -> LengthBucketedBatches:
    """The batches of pairs of similar length, a function of the seed."""
    return LengthBucketedBatches([pair.length for pair in train], config.batch_size, derive_seed(seed, "dpo", "order"))


def scoring_rows(config: DpoConfig) -> int:
    """Sequences of one pass without gradient: no more than a training pass has, where that is bounded."""
    return 2 * config.micro_batch_size if config.micro_batch_size is not None else SCORING_ROWS


def per_token(logprobs: PairLogprobs, lengths: PairLogprobs) -> PairLogprobs:
    """Means over the tokens of each reply instead of sums."""
    return PairLogprobs(logprobs.chosen / lengths.chosen, logprobs.rejected / lengths.rejected)


def reward_means(rewards: ImplicitRewards, total: int) -> dict[str, Scalar]:
    """What the history reports: sums over pairs, divided by ``total``."""
    margins = rewards.margins.detach()
    return {
        "accuracy": device_scalar((margins > 0).sum()) / total,
        "margin": device_scalar(margins.sum()) / total,
        "implicit_reward_chosen": device_scalar(rewards.chosen.sum()) / total,
        "implicit_reward_rejected": device_scalar(rewards.rejected.sum()) / total,
    }


NAME = "dpo"


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
    """Train ``model`` in place by DPO; what it is at the start is the reference. Of several ranks only rank 0 returns.

    An interrupted run resumes from ``context.work``. The reference is in memory only before the first step: its
    log-probabilities of all pairs that will be used are computed then and kept with the partial state.
    """
    if lora is not None:
        # Before the reference is read: the policy begins with the rounding of quantised weights.
        add_adapters(model, lora, derive_seed(seed, NAME, "lora"))
    limit, rows = context.launch.logits_bytes, scoring_rows(config)
    order = dpo_batches(train.pairs, config, seed)
    used = {row for step in range(config.steps) for row in order.at(step)}
    held_out = validation.pairs[:CURVE_PAIRS]
    references = (
        reference_logprobs(model, train.pairs, used, pad, context.work / "reference_train.safetensors", rows, limit),
        reference_logprobs(
            model, held_out, range(len(held_out)), pad, context.work / "reference_validation.safetensors", rows, limit
        ),
    )
    engine = build_engine(model, config.optimizer, config.steps, NAME, context)
    task = DpoTask(engine, model, train.pairs, held_out, references, config, seed, pad, limit)
    settings = LoopSettings(NAME, seed, config.steps, config.eval_every, config.checkpoint)
    result = Loop(engine, task, settings, context).run()
    model = finish(engine, model)
    adapter = None
    if lora is not None:
        adapter = peft_adapter(model)
        merge_adapters(model)
    first, last = result.evaluations()[0], result.evaluations()[-1]
    metrics = {
        "steps": config.steps,
        "train_pairs": len(train.pairs),
        "train_pairs_used": len(used),
        "dropped_over_long": train.dropped["over_long"],
        "dropped_identical": train.dropped["identical"],
        "validation_loss_before": first["validation_loss"],
        **{name: value for name, value in last.items() if name.startswith("validation_")},
        "train_tokens": result.tokens,
        "train_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "skipped_steps": engine.skipped_steps,
    }
    return DpoRun(model, metrics, result.history, adapter)

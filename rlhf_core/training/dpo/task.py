"""DPO as a task of the supervised loop: gradients of one step, evaluation on held-out pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.policy import DpoConfig
from rlhf_core.data.batches import passes
from rlhf_core.data.pairs import TokenisedPair
from rlhf_core.models.lazy_logits import LOGITS_BYTES
from rlhf_core.runtime import distributed
from rlhf_core.training.device_scalars import Scalar, device_scalar, read_scalars
from rlhf_core.training.dpo.logprobs import SCORING_ROWS, all_logprobs, batch_logprobs
from rlhf_core.training.dpo.loss import ImplicitRewards, PairLogprobs, dpo_loss, implicit_rewards
from rlhf_core.training.engine import Engine
from rlhf_core.training.examples import LengthBucketedBatches
from rlhf_core.training.loop import StepReport
from rlhf_core.training.reward.trainer import real_tokens
from rlhf_core.training.rng import derive_seed

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
        shares: list[dict[str, Scalar]] = []
        weights: list[float] = []
        for part, weight in passes(rows, self.micro):
            pairs = [self.train[row] for row in part]
            loss, rewards = self.engine.forward(partial(self._loss, pairs, part, len(rows)))
            self.engine.backward(weight * loss)
            shares.append({"loss": device_scalar(loss), **reward_sums(rewards)})
            weights.append(weight)
        sums = dict.fromkeys(shares[0], 0.0)
        for share, weight in zip(read_scalars(shares), weights, strict=True):
            sums["loss"] += weight * share.pop("loss")
            for name, value in share.items():
                sums[name] += weight * value / len(rows)
        tokens = sum(real_tokens(self.train[row]) for row in rows)
        return StepReport(distributed.reduce_metrics(sums), tokens)

    def _loss(self, pairs: Sequence[TokenisedPair], rows: Sequence[int], total: int) -> tuple[Tensor, ImplicitRewards]:
        policy = batch_logprobs(self.model, pairs, self.pad, self.logits_bytes)
        rewards = self._rewards(pairs, policy, self.train_reference, rows)
        return dpo_loss(rewards.margins, self.config.label_smoothing, total), rewards

    def evaluate(self) -> dict[str, float]:
        """``loss``, ``accuracy``, ``margin`` and the implicit rewards on held-out pairs (at most 512)."""
        policy = all_logprobs(self.model, self.validation, self.pad, self.scoring_rows, self.logits_bytes)
        count = len(self.validation)
        rewards = self._rewards(self.validation, policy, self.validation_reference, range(count))
        loss = device_scalar(dpo_loss(rewards.margins, self.config.label_smoothing, count))
        (metrics,) = read_scalars([{"loss": loss} | reward_sums(rewards)])
        return {name: value if name == "loss" else value / count for name, value in metrics.items()}

    @property
    def scoring_rows(self) -> int:
        """Sequences of one pass without gradient."""
        return scoring_rows(self.config)

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


def reward_sums(rewards: ImplicitRewards) -> dict[str, Scalar]:
    """Sums over pairs of what the history reports."""
    margins = rewards.margins.detach()
    return {
        "accuracy": device_scalar((margins > 0).sum()),
        "margin": device_scalar(margins.sum()),
        "implicit_reward_chosen": device_scalar(rewards.chosen.sum()),
        "implicit_reward_rejected": device_scalar(rewards.rejected.sum()),
    }

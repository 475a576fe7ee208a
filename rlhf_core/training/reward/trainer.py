"""The reward model's objective: pairwise ranking, imitation and centering, in dynamic batches (algorithms.md §2).

Shapes: B pairs, L positions, H hidden. Chosen and rejected replies go through the backbone together, as 2B rows, or
fewer where pairs of one prompt share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_core import distributed
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.batching import token_budget_batches
from rlhf_core.data.length_balance import length_balanced_epoch
from rlhf_core.data.pairs import TokenisedPair
from rlhf_core.data.prompt_batches import PromptBatches, sequence_keys
from rlhf_core.data.sharding import passes
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.lazy_logits import LOGITS_BYTES
from rlhf_core.training.engine import Engine
from rlhf_core.training.examples import ReplyBatch, by_length, collate
from rlhf_core.training.loop import StepReport
from rlhf_core.training.losses import centering_loss, chunked_cross_entropy, pairwise_loss
from rlhf_core.training.rng import derive_seed

Rewards = npt.NDArray[np.float64]
SCORING_ROWS, SCORING_TOKENS = 128, 16384
CURVE_PAIRS = 512


@dataclass(frozen=True)
class PairScores:
    """Rewards of the chosen and the rejected reply of each pair, float64 (B,)."""

    chosen: Rewards
    rejected: Rewards

    @property
    def margins(self) -> Rewards:
        """``r_w - r_l`` (B,)."""
        return self.chosen - self.rejected


@dataclass(frozen=True)
class StepTotals:
    """The divisors of the losses of one optimiser step: pairs, and tokens of chosen replies."""

    pairs: int
    tokens: int


class PairBatches:
    """The batch of each optimiser step, a function of the step, from batches made epoch by epoch.

    Args:
        batches_of_epoch: The batches of an epoch by its number, a function of the number alone.
    """

    def __init__(self, batches_of_epoch: Callable[[int], list[list[int]]]) -> None:
        self.batches_of_epoch = batches_of_epoch
        self._epoch, self._first = -1, 0
        self._batches: list[list[int]] = []

    def at(self, step: int) -> list[int]:
        """Pair numbers of optimiser step ``step``."""
        if step < self._first:
            self._epoch, self._first, self._batches = -1, 0, []
        while step >= self._first + len(self._batches):
            # The number of batches of an epoch is known only once it is made.
            self._first += len(self._batches)
            self._epoch += 1
            self._batches = self.batches_of_epoch(self._epoch)
        return self._batches[step - self._first]


def pair_batches(pairs: Sequence[TokenisedPair], config: RewardConfig, name: str) -> PairBatches:
    """Plan the batches within a token budget (paper, section 4.2): of single pairs, or of whole prompts."""
    limits, seed, lengths = config.batch, derive_seed(config.seed, name, "order"), [pair.length for pair in pairs]
    prompts = PromptBatches(pairs, limits, seed) if limits.group_prompts else None

    def batches_of_epoch(epoch: int) -> list[list[int]]:
        rows = rows_of_epoch(pairs, config, name, epoch)
        if prompts is not None:
            return prompts.epoch(epoch, rows)
        sizes = (limits.token_budget, limits.min_pairs, limits.max_pairs)
        return token_budget_batches(lengths, *sizes, seed, epoch, rows)

    return PairBatches(batches_of_epoch)


def rows_of_epoch(pairs: Sequence[TokenisedPair], config: RewardConfig, name: str, epoch: int) -> list[int]:
    """Pair numbers that an epoch of the model ``name`` consists of: all of them, or a draw that is length-balanced."""
    if config.length_balance != "sampling":
        return list(range(len(pairs)))
    seed = derive_seed(config.seed, name, "length_balance")
    return length_balanced_epoch([pair.length_difference for pair in pairs], seed, epoch)


class RewardTask:
    """Pairwise ranking of preference pairs, evaluated by accuracy on held-out ones.

    ``margins``, one per training pair, may be None. ``logits_bytes`` of float32 logits may exist at a time.
    """

    def __init__(
        self,
        engine: Engine,
        model: ScalarModel,
        train: Sequence[TokenisedPair],
        validation: Sequence[TokenisedPair],
        config: RewardConfig,
        pad: int,
        name: str,
        margins: Sequence[float] | None = None,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        self.logits_bytes = logits_bytes
        self.engine, self.model, self.train, self.config, self.pad = engine, model, train, config, pad
        self.validation, self.margins = validation[:CURVE_PAIRS], margins
        self.batches = pair_batches(train, config, name)

    def train_step(self, step: int) -> StepReport:
        """Compute the gradients of one optimiser step on one dynamic batch."""
        rows = self.batches.at(step)
        pairs = [self.train[row] for row in rows]
        totals = StepTotals(len(pairs), sum(len(pair.chosen) for pair in pairs))
        # Each rank takes its share of the batch in one pass.
        ((part, weight),) = passes(rows, len(rows))
        loss, metrics = self.engine.forward(lambda: self._loss(part, totals))
        self.engine.backward(weight * loss)
        metrics = distributed.reduce_metrics({name: weight * value for name, value in metrics.items()})
        return StepReport(metrics | {"pairs": float(len(pairs))}, sum(real_tokens(pair) for pair in pairs))

    def _loss(self, rows: Sequence[int], totals: StepTotals) -> tuple[Tensor, dict[str, float]]:
        margins = torch.tensor([self.margins[row] for row in rows]) if self.margins is not None else None
        pairs = [self.train[row] for row in rows]
        return pair_loss(self.model, pairs, margins, self.config, self.pad, totals, self.logits_bytes)

    def evaluate(self) -> dict[str, float]:
        """Ranking ``loss``, ``accuracy`` and mean ``margin`` on held-out pairs (at most 512, for the curve)."""
        margins = score_pairs(self.model, self.validation, self.pad).margins
        loss = float(np.logaddexp(0.0, -margins).mean())
        return {"loss": loss, "accuracy": float((margins > 0).mean()), "margin": float(margins.mean())}


def real_tokens(pair: TokenisedPair) -> int:
    """Tokens of both sequences, without padding."""
    return 2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


@dataclass(frozen=True)
class PairBatch:
    """The sequences of B pairs, right-padded together, and where each pair has its own.

    Attributes:
        sequences: First the chosen sequences, then the rejected ones; shared ones once, where they first occur.
        chosen: Row of each pair's chosen sequence (B,).
        rejected: Row of each pair's rejected sequence (B,).
    """

    sequences: ReplyBatch
    chosen: Tensor
    rejected: Tensor


def pair_batch(pairs: Sequence[TokenisedPair], pad: int, device: torch.device, share: bool) -> PairBatch:
    """Collate pairs on ``device``; with ``share`` a sequence that several have takes one row."""
    keys = sequence_keys(pairs)
    row_of = {key: row for row, key in enumerate(dict.fromkeys(keys))} if share else {}
    sequences = list(row_of) if share else keys
    rows = torch.tensor([row_of[key] for key in keys] if share else range(len(keys)), device=device)
    batch = collate([prompt for prompt, _ in sequences], [reply for _, reply in sequences], pad)
    return PairBatch(batch.to(device), *rows.chunk(2))


def pair_loss(
    model: ScalarModel,
    pairs: Sequence[TokenisedPair],
    margins: Tensor | None,
    config: RewardConfig,
    pad: int,
    totals: StepTotals,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[Tensor, dict[str, float]]:
    """Ranking loss + ``imitation`` * CE(y_w) + ``centering`` * mean((r_w + r_l)^2).

    Args:
        pairs: All pairs of the optimiser step, or a rank's shard of them.
        totals: Sizes of the whole step.
        logits_bytes: Bytes of float32 logits that may exist at a time.

    Returns:
        The shard's part of the step's loss, and its part of each metric.
    """
    batch = pair_batch(pairs, pad, next(model.parameters()).device, config.batch.group_prompts)
    sequences = batch.sequences
    hidden = model.hidden(sequences.input_ids, sequences.attention_mask)
    scores = model.scores(model.pool(hidden, sequences.attention_mask, sequences.reply_mask))
    chosen, rejected = scores[batch.chosen], scores[batch.rejected]
    loss = pairwise_loss(chosen, rejected, margins.to(chosen) if margins is not None else None, totals.pairs)
    share = len(pairs) / totals.pairs
    metrics = {
        "ranking_loss": float(loss.detach()),
        "accuracy": share * float((chosen > rejected).float().mean()),
        "margin": share * float((chosen - rejected).detach().mean()),
    }
    if config.imitation > 0:
        targets = torch.tensor([token for pair in pairs for token in pair.chosen], device=hidden.device)
        imitation = imitation_loss(model, hidden, batch, targets, totals.tokens, logits_bytes)
        loss = loss + config.imitation * imitation
        metrics["imitation_loss"] = float(imitation.detach())
    if config.centering > 0:
        loss = loss + config.centering * centering_loss(chosen, rejected, totals.pairs)
    return loss, metrics | {"loss": float(loss.detach())}


def imitation_loss(
    model: ScalarModel,
    hidden: Tensor,
    batch: PairBatch,
    targets: Tensor,
    total: int,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """Language-model loss on the *chosen* replies alone, from the hidden states of all: (rows, L, H) -> ().

    Args:
        targets: Tokens of each pair's chosen reply, one pair after the other.
        total: Their number in the whole optimiser step.
        logits_bytes: Bytes of float32 logits that may exist at a time.
    """
    pair, column = batch.sequences.select[batch.chosen].nonzero(as_tuple=True)
    logits = model.lm_logits(hidden[batch.chosen[pair], column])
    return chunked_cross_entropy(logits, targets, total, logits_bytes)


@torch.no_grad()
def score_pairs(model: ScalarModel, pairs: Sequence[TokenisedPair], pad: int) -> PairScores:
    """Score all pairs; the rewards are in the order of ``pairs``.

    Sequences are batched by their own length, since the two of a pair often differ much, and one that several pairs
    share is scored once.
    """
    was_training = model.training
    model.eval()
    keys = sequence_keys(pairs)
    sequences = list(dict.fromkeys(keys))
    lengths = [len(prompt) + len(reply) for prompt, reply in sequences]
    size = max(1, min(SCORING_ROWS, SCORING_TOKENS // max(lengths)))
    scores = torch.zeros(len(sequences), dtype=torch.float64)
    device = next(model.parameters()).device
    for rows, weight in passes(by_length(lengths), size):
        batch = collate([sequences[row][0] for row in rows], [sequences[row][1] for row in rows], pad).to(device)
        values = model.reply_scores(batch.input_ids, batch.attention_mask, batch.reply_mask)
        if weight:
            scores[rows] = values.double().cpu()
    model.train(was_training)
    # Each rank has scored its own sequences and left zeros at the others.
    of_sequence = dict(zip(sequences, distributed.all_reduce_sum(scores).tolist(), strict=True))
    both = np.array([of_sequence[key] for key in keys])
    return PairScores(*np.split(both, 2))

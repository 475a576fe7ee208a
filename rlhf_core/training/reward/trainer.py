"""The reward model's objective.

It is pairwise ranking, imitation and centering, in dynamic batches (algorithms.md §2).

Shapes: B pairs, L positions, H hidden. Chosen and rejected replies go through the backbone as 2B
rows, or fewer where pairs of one prompt share them: all together, or in micro-batches of similar
length where padding would be too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_core.config.reward import CURVE_PAIRS, PairBatchConfig, RewardConfig
from rlhf_core.data.batches import (
    PromptBatches,
    TokenisedPair,
    least_padded,
    length_balanced_epoch,
    padding_share,
    pair_sequences,
    passes,
    rows_by_category_share,
    token_budget_batches,
)
from rlhf_core.models.forward import LOGITS_BYTES, right_padded
from rlhf_core.models.heads import ScalarModel
from rlhf_core.runtime import distributed
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.examples import ReplyBatch, collate, values_of_sequences
from rlhf_core.training.loop import StepReport
from rlhf_core.training.losses import (
    StepTotals,
    centering_loss,
    chunked_cross_entropy,
    pairwise_loss,
    ranked_right,
)
from rlhf_core.training.passes import Scalar, accumulate_gradients, device_scalar
from rlhf_core.training.reward.evaluation import accuracy
from rlhf_core.training.rng import derive_seed


@dataclass(frozen=True)
class PairBatch:
    """The sequences of B pairs in micro-batches that follow each other.

    Attributes:
        micro_batches: Sequences that pass the model together, right-padded.
        chosen: The row of each pair's chosen sequence among all of them (B,).
        rejected: The row of its rejected one (B,).
    """

    micro_batches: list[ReplyBatch]
    chosen: Tensor
    rejected: Tensor


def pair_batch(
    pairs: Sequence[TokenisedPair],
    pad: int,
    device: torch.device,
    config: PairBatchConfig,
    micro_batches: Sequence[Sequence[int]] | None = None,
) -> PairBatch:
    """Collate pairs on ``device``.

    With ``group_prompts`` a sequence that several pairs have is computed once.

    Args:
        micro_batches: Numbers of the distinct sequences that are padded together; None for one
            micro-batch.
    """
    sequences = pair_sequences(pairs, config.group_prompts)
    collated: list[ReplyBatch] = []
    row_of: dict[int, int] = {}
    for part in micro_batches or [range(len(sequences.distinct))]:
        in_part = [sequences.distinct[number] for number in part]
        prompts, replies = zip(*in_part, strict=True)
        collated.append(collate(prompts, replies, pad).to(device))
        for number in part:
            row_of[number] = len(row_of)
    chosen = [row_of[number] for number in sequences.chosen]
    rejected = [row_of[number] for number in sequences.rejected]
    chosen_rows = torch.tensor(chosen, device=device)
    rejected_rows = torch.tensor(rejected, device=device)
    return PairBatch(collated, chosen_rows, rejected_rows)


Rewards = npt.NDArray[np.float64]
SCORING_ROWS, SCORING_TOKENS = 128, 16384


@dataclass(frozen=True)
class PairScores:
    """Rewards of the chosen and the rejected reply of each pair, float64 (B,)."""

    chosen: Rewards
    rejected: Rewards

    @property
    def margins(self) -> Rewards:
        """``r_w - r_l`` (B,)."""
        return self.chosen - self.rejected


class PairBatches:
    """The batches within a token budget (paper, section 4.2), of single pairs or of whole prompts.

    The batch of an optimiser step is a function of the step; batches are made epoch by epoch.
    """

    def __init__(self, pairs: Sequence[TokenisedPair], config: RewardConfig, name: str) -> None:
        self.pairs = pairs
        self.config = config
        self.name = name
        self.seed = derive_seed(config.seed, name, "order")
        self.prompts: PromptBatches | None = None
        if config.batch.group_prompts:
            self.prompts = PromptBatches(pairs, config.batch, self.seed)
        self.lengths = [pair.length for pair in pairs]
        self._begin()

    def _begin(self) -> None:
        self._epoch = -1
        self._first = 0  # step of the first of the batches
        self._batches: list[list[int]] = []

    def at(self, step: int) -> list[int]:
        """Pair numbers of optimiser step ``step``."""
        if step < self._first:
            self._begin()
        while step >= self._first + len(self._batches):
            # The number of batches of an epoch is known only once it is made.
            self._first += len(self._batches)
            self._epoch += 1
            self._batches = self.batches_of_epoch(self._epoch)
        return self._batches[step - self._first]

    def batches_of_epoch(self, epoch: int) -> list[list[int]]:
        """Pair numbers of each batch of an epoch."""
        rows = rows_of_epoch(self.pairs, self.config, self.name, epoch)
        if self.prompts is not None:
            return self.prompts.epoch(epoch, rows)
        limits = self.config.batch
        return token_budget_batches(
            self.lengths,
            limits.token_budget,
            limits.min_pairs,
            limits.max_pairs,
            self.seed,
            epoch,
            rows,
        )


def rows_of_epoch(
    pairs: Sequence[TokenisedPair], config: RewardConfig, name: str, epoch: int
) -> list[int]:
    """Pair numbers that an epoch of the model ``name`` consists of.

    These are all of them, or a draw that is length-balanced in each category with a share and in
    all others together; then categories get their shares.

    Raises:
        DataError: A category that has a share has no such pair.
    """
    shares = config.category_shares
    rows = list(range(len(pairs)))
    if config.length_balance == "sampling":
        groups: dict[str | None, list[int]] = {None: []}  # None: all that have no share
        for number, pair in enumerate(pairs):
            category = pair.category if pair.category in shares else None
            groups.setdefault(category, []).append(number)
        rows = []
        for category, group in groups.items():
            stream = [name, "length_balance"]
            if category is not None:
                stream.append(category)
            seed = derive_seed(config.seed, *stream)
            differences = [pairs[row].length_difference for row in group]
            drawn = length_balanced_epoch(differences, seed, epoch)
            rows += [group[number] for number in drawn]
        rows.sort()
    if not shares:
        return rows
    seed = derive_seed(config.seed, name, "category_shares")
    categories = [pair.category for pair in pairs]
    return rows_by_category_share(categories, shares, seed, epoch, f"{name}.category_shares", rows)


class RewardTask:
    """Pairwise ranking of preference pairs, evaluated by accuracy on held-out ones.

    ``margins``, one per training pair, may be None. ``logits_bytes`` of float32 logits may exist at
    a time.
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
        self.engine, self.model = engine, model
        self.train = train
        self.validation = validation[:CURVE_PAIRS]
        self.config, self.pad = config, pad
        self.margins = margins
        self.batches = PairBatches(train, config, name)

    def train_step(self, step: int) -> StepReport:
        """Compute the gradients of one optimiser step on one dynamic batch."""
        rows = self.batches.at(step)
        pairs = [self.train[row] for row in rows]
        imitated = sum(len(pair.chosen) for pair in pairs)
        totals = StepTotals(len(pairs), imitated)
        count = distributed.world_size()
        # Tokens of each row that a rank computes; one without rows of its own repeats the first
        # one, see passes.
        shards = []
        for rank in range(count):
            rows_of_rank = rows[rank::count] or rows[:1]
            own = [self.train[row] for row in rows_of_rank]
            sequences = pair_sequences(own, self.config.batch.group_prompts)
            shards.append(sequences.lengths)
        micro_batches = least_padded(shards, self.config.batch.max_padding)
        own_micro_batches = micro_batches[distributed.rank()].micro_batches

        def compute(part: list[int]) -> tuple[Tensor, dict[str, Scalar]]:
            margins = None
            if self.margins is not None:
                margins = torch.tensor([self.margins[row] for row in part])
            own = [self.train[row] for row in part]
            return pair_loss(
                self.model,
                own,
                margins,
                self.config,
                self.pad,
                totals,
                own_micro_batches,
                self.logits_bytes,
            )

        # Each rank takes its share of the batch.
        metrics = accumulate_gradients(self.engine, passes(rows, len(rows)), compute)
        computed = sum(part.computed for part in micro_batches)
        useful = sum(sum(lengths) for lengths in shards)
        metrics["pairs"] = float(len(pairs))
        metrics["padding_share"] = padding_share(useful, computed)
        return StepReport(metrics, sum(real_tokens(pair) for pair in pairs))

    def evaluate(self, model: ScalarModel) -> dict[str, float]:
        """Measure ranking loss, accuracy and mean margin on at most 512 held-out pairs."""
        margins = score_pairs(model, self.validation, self.pad).margins
        loss = float(np.logaddexp(0.0, -margins).mean())
        return {"loss": loss, "accuracy": accuracy(margins), "margin": float(margins.mean())}


def real_tokens(pair: TokenisedPair) -> int:
    """Tokens of both sequences, without padding."""
    return 2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


def pair_loss(
    model: ScalarModel,
    pairs: Sequence[TokenisedPair],
    margins: Tensor | None,
    config: RewardConfig,
    pad: int,
    totals: StepTotals,
    micro_batches: Sequence[Sequence[int]] | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[Tensor, dict[str, Scalar]]:
    """Ranking loss + ``imitation`` * CE(y_w) + ``centering`` * mean((r_w + r_l)^2).

    Args:
        pairs: All pairs of the optimiser step, or a rank's shard of them.
        totals: Sizes of the whole step.
        micro_batches: Which rows pass the backbone together, see :func:`pair_batch`. The loss joins
            them again.

    Returns:
        The shard's part of the step's loss, and its part of each metric.
    """
    device = next(model.parameters()).device
    batch = pair_batch(pairs, pad, device, config.batch, micro_batches)
    hidden, scores_of_parts = [], []
    for part in batch.micro_batches:
        states = model.hidden(part.input_ids, *right_padded(part.attention_mask))
        pooled = model.pool(states, part.attention_mask, part.reply_mask)
        hidden.append(states)
        scores_of_parts.append(model.scores(pooled))
    scores = torch.cat(scores_of_parts)
    chosen = scores[batch.chosen]
    rejected = scores[batch.rejected]
    if margins is not None:
        margins = margins.to(chosen)
    loss = pairwise_loss(chosen, rejected, margins, totals.rows)
    share = len(pairs) / totals.rows
    difference = chosen - rejected
    metrics: dict[str, Scalar] = {
        "ranking_loss": device_scalar(loss),
        "accuracy": share * device_scalar(ranked_right(difference).mean()),
        "margin": share * device_scalar(difference.mean()),
    }
    if config.imitation > 0:
        imitation = imitation_loss(model, hidden, batch, pairs, totals.tokens, logits_bytes)
        loss = loss + config.imitation * imitation
        metrics["imitation_loss"] = device_scalar(imitation)
    if config.centering > 0:
        loss = loss + config.centering * centering_loss(chosen, rejected, totals.rows)
    return loss, metrics | {"loss": device_scalar(loss)}


def imitation_loss(
    model: ScalarModel,
    hidden: Sequence[Tensor],
    batch: PairBatch,
    pairs: Sequence[TokenisedPair],
    total: int,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """Language-model loss on the *chosen* replies alone, from the hidden states of all.

    Shapes: (rows, L, H) each -> ().

    Args:
        hidden: Those of each micro-batch of ``batch``.
        total: Tokens of chosen replies in the whole optimiser step.
    """
    predicting: list[Tensor] = []
    targets: list[int] = []
    first = 0
    for states, part in zip(hidden, batch.micro_batches, strict=True):
        end = first + len(states)
        is_here = (batch.chosen >= first) & (batch.chosen < end)
        own = is_here.nonzero().squeeze(1)
        rows = batch.chosen[own] - first
        pair, column = part.select[rows].nonzero(as_tuple=True)
        predicting.append(states[rows[pair], column])
        for number in own.tolist():
            targets.extend(pairs[number].chosen)
        first = end
    # Joined before the unembedding: every rank gathers it once, also one with a micro-batch of
    # rejected replies alone.
    logits = model.lm_logits(torch.cat(predicting))
    expected = torch.tensor(targets, device=hidden[0].device)
    return chunked_cross_entropy(logits, expected, total, logits_bytes)


def rows_to_score(longest: int) -> int:
    """How many sequences of ``longest`` tokens are scored at once."""
    return max(1, min(SCORING_ROWS, SCORING_TOKENS // longest))


def score_pairs(
    model: ScalarModel, pairs: Sequence[TokenisedPair], pad: int, name: str | None = None
) -> PairScores:
    """Score all pairs; the rewards are in the order of ``pairs``.

    Sequences are batched by their own length, since the two of a pair often differ much, and one
    that several pairs share is scored once. With ``name`` the progress is shown under it.
    """
    was_training = model.training
    model.eval()
    sequences = pair_sequences(pairs)
    size = rows_to_score(max(sequences.lengths))
    device = next(model.parameters()).device
    of_sequence = values_of_sequences(
        sequences.distinct,
        lambda batch: model.reply_scores(batch.input_ids, batch.attention_mask, batch.reply_mask),
        size,
        pad,
        device,
        name,
    ).numpy()
    model.train(was_training)
    return PairScores(of_sequence[sequences.chosen], of_sequence[sequences.rejected])

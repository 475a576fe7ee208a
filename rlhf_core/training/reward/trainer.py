"""The reward model's objective: pairwise ranking, imitation and centering, in dynamic batches (algorithms.md §2).

Shapes: B pairs, L positions, H hidden. Chosen and rejected replies go through the backbone together, as 2B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_core import distributed
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.batching import token_budget_batches
from rlhf_core.data.length_balance import length_balanced_epoch
from rlhf_core.data.pairs import TokenisedPair
from rlhf_core.data.sharding import passes
from rlhf_core.models.heads import ScalarModel, last_hidden
from rlhf_core.training.engine import Engine
from rlhf_core.training.examples import ReplyBatch, by_length, collate
from rlhf_core.training.loop import StepReport
from rlhf_core.training.losses import centering_loss, pairwise_loss, token_cross_entropy
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


class TokenBudgetBatches:
    """Batches of pairs within a token budget (paper, section 4.2); a batch is a function of the seed and the step.

    ``rows_of_epoch`` gives the pairs of an epoch by its number, a function of the number alone; by default all.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch: PairBatchConfig,
        seed: int,
        rows_of_epoch: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.lengths, self.batch, self.seed, self.rows_of_epoch = lengths, batch, seed, rows_of_epoch
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
            limits = (self.batch.token_budget, self.batch.min_pairs, self.batch.max_pairs)
            rows = self.rows_of_epoch(self._epoch) if self.rows_of_epoch is not None else None
            self._batches = token_budget_batches(self.lengths, *limits, self.seed, self._epoch, rows)
        return self._batches[step - self._first]


class RewardTask:
    """Pairwise ranking of preference pairs, evaluated by accuracy on held-out ones.

    ``margins``, one per training pair, may be None.
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
    ) -> None:
        self.engine, self.model, self.train, self.config, self.pad = engine, model, train, config, pad
        self.validation, self.margins = validation[:CURVE_PAIRS], margins
        rows_of_epoch = None
        if config.length_balance == "sampling":
            differences = [pair.length_difference for pair in train]
            rows_of_epoch = partial(
                length_balanced_epoch, differences, derive_seed(config.seed, name, "length_balance")
            )
        self.batches = TokenBudgetBatches(
            [pair.length for pair in train], config.batch, derive_seed(config.seed, name, "order"), rows_of_epoch
        )

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
        return pair_loss(self.model, [self.train[row] for row in rows], margins, self.config, self.pad, totals)

    def evaluate(self) -> dict[str, float]:
        """Ranking ``loss``, ``accuracy`` and mean ``margin`` on held-out pairs (at most 512, for the curve)."""
        margins = score_pairs(self.model, self.validation, self.pad).margins
        loss = float(np.logaddexp(0.0, -margins).mean())
        return {"loss": loss, "accuracy": float((margins > 0).mean()), "margin": float(margins.mean())}


def real_tokens(pair: TokenisedPair) -> int:
    """Tokens of both sequences, without padding."""
    return 2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


def pair_batch(pairs: Sequence[TokenisedPair], pad: int, device: torch.device) -> ReplyBatch:
    """Rows 0 to B-1 are the chosen sequences, B to 2B-1 the rejected ones, right-padded together."""
    prompts = [pair.prompt for pair in pairs]
    batch = collate(prompts + prompts, [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad)
    return ReplyBatch(*(tensor.to(device) for tensor in vars(batch).values()))


def pair_loss(
    model: ScalarModel,
    pairs: Sequence[TokenisedPair],
    margins: Tensor | None,
    config: RewardConfig,
    pad: int,
    totals: StepTotals,
) -> tuple[Tensor, dict[str, float]]:
    """Ranking loss + ``imitation`` * CE(y_w) + ``centering`` * mean((r_w + r_l)^2).

    Args:
        pairs: All pairs of the optimiser step, or a rank's shard of them.
        totals: Sizes of the whole step.

    Returns:
        The shard's part of the step's loss, and its part of each metric.
    """
    batch = pair_batch(pairs, pad, next(model.parameters()).device)
    hidden = model.hidden(batch.input_ids, batch.attention_mask)
    chosen, rejected = model.scores(last_hidden(hidden, batch.attention_mask)).chunk(2)
    loss = pairwise_loss(chosen, rejected, margins.to(chosen) if margins is not None else None, totals.pairs)
    share = len(pairs) / totals.pairs
    metrics = {
        "ranking_loss": float(loss.detach()),
        "accuracy": share * float((chosen > rejected).float().mean()),
        "margin": share * float((chosen - rejected).detach().mean()),
    }
    if config.imitation > 0:
        imitation = imitation_loss(model, hidden[: len(pairs)], batch, totals.tokens)
        loss = loss + config.imitation * imitation
        metrics["imitation_loss"] = float(imitation.detach())
    if config.centering > 0:
        loss = loss + config.centering * centering_loss(chosen, rejected, totals.pairs)
    return loss, metrics | {"loss": float(loss.detach())}


def imitation_loss(model: ScalarModel, hidden: Tensor, batch: ReplyBatch, total: int) -> Tensor:
    """Language-model loss on the *chosen* replies alone, from their hidden states: (B, L, H) -> ()."""
    select = batch.select[: hidden.shape[0]]
    targets = batch.targets[: int(select.sum())]
    return token_cross_entropy(model.lm_logits(hidden[select]), targets, total)


@torch.no_grad()
def score_pairs(model: ScalarModel, pairs: Sequence[TokenisedPair], pad: int) -> PairScores:
    """Score all pairs; the rewards are in the order of ``pairs``.

    Sequences are batched by their own length, since the two of a pair often differ much, and one that several pairs
    share is scored once.
    """
    was_training = model.training
    model.eval()
    replies = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    keys = [(tuple(pair.prompt), tuple(reply)) for pair, reply in zip([*pairs, *pairs], replies, strict=True)]
    sequences = list(dict.fromkeys(keys))
    lengths = [len(prompt) + len(reply) for prompt, reply in sequences]
    size = max(1, min(SCORING_ROWS, SCORING_TOKENS // max(lengths)))
    scores = torch.zeros(len(sequences), dtype=torch.float64)
    device = next(model.parameters()).device
    for rows, weight in passes(by_length(lengths), size):
        batch = collate([sequences[row][0] for row in rows], [sequences[row][1] for row in rows], pad)
        values = model.last_token_scores(batch.input_ids.to(device), batch.attention_mask.to(device))
        if weight:
            scores[rows] = values.double().cpu()
    model.train(was_training)
    # Each rank has scored its own sequences and left zeros at the others.
    of_sequence = dict(zip(sequences, distributed.all_reduce_sum(scores).tolist(), strict=True))
    both = np.array([of_sequence[key] for key in keys])
    return PairScores(*np.split(both, 2))

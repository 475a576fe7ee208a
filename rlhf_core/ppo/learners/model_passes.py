"""Passes of a policy in training: statistics of replies, and gradients that are added up over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.lazy_logits import LazyLogits
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses.loss_reduction import StepSize
from rlhf_core.ppo.losses.objective import PolicyLoss
from rlhf_core.ppo.metrics import MetricRecord, total
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.micro_batches import MicroBatchLimits
from rlhf_core.sampling.token_scoring import Tokens, response_logits
from rlhf_core.sampling.token_statistics import DistributionScorer, TokenStatistics
from rlhf_core.training.engine import Engine

Metrics = TypeVar("Metrics", bound=MetricRecord)


class PassSettings:
    """How many rows, positions and logits a pass may have, and under which distribution tokens are scored."""

    sampling: Sampling
    micro_batch_size: int | None
    logits_bytes: int
    micro_batch_tokens: int | None

    @property
    def limits(self) -> MicroBatchLimits:
        """Those of one pass."""
        return MicroBatchLimits(self.micro_batch_size, self.micro_batch_tokens)

    @property
    def scorer(self) -> DistributionScorer:
        """One that keeps to ``logits_bytes``."""
        return DistributionScorer(self.sampling, self.logits_bytes)


class ScoreTokens(Protocol):
    """``ActorCriticPair.score_tokens``."""

    def __call__(
        self, batch: Tokens, *, entropies: bool = False, reference: PreTrainedModel | None = None
    ) -> TokenStatistics:
        """What the policy says of response tokens."""


def score_in_engine(
    engine: Engine,
    policy: PreTrainedModel,
    scorer: DistributionScorer,
    batch: Tokens,
    entropies: bool,
    reference: PreTrainedModel | None,
) -> TokenStatistics:
    """:meth:`ActorCriticPair.score_tokens` of a policy that ``engine`` trains."""

    def forward() -> dict[str, Tensor]:  # engines look for tensors in what a pass returns
        logits = response_logits(policy, batch)
        other = frozen_logits(reference, batch)
        return scorer.score(logits, batch, entropies=entropies, reference=other).tensors()

    return TokenStatistics(**engine.forward(forward))


@torch.no_grad()
def frozen_logits(reference: PreTrainedModel | None, batch: Tokens) -> LazyLogits | None:
    """Logits of the reference at response positions, where there is one."""
    return response_logits(reference, batch) if reference is not None else None


def accumulate(
    engine: Engine,
    minibatch: Experience,
    limits: MicroBatchLimits,
    loss_of: Callable[[Experience, StepSize], tuple[Tensor, Metrics]],
) -> Metrics:
    """Backward passes of one loss over a minibatch; returns the metrics of the whole minibatch over all ranks."""
    size = StepSize.of(minibatch.response_mask)
    parts = []
    for batch, weight in minibatch.micro_batches(limits):
        loss, metrics = loss_of(batch, size)
        engine.backward(weight * loss)
        parts.append((metrics, weight))
    return total(parts)


def accumulate_policy_gradients(
    engine: Engine,
    score_tokens: ScoreTokens,
    minibatch: Experience,
    limits: MicroBatchLimits,
    policy: PolicyLoss[Metrics],
) -> Metrics:
    """Backward passes of the policy's loss over a minibatch; returns its metrics."""

    def loss(batch: Experience, size: StepSize) -> tuple[Tensor, Metrics]:
        tokens = score_tokens(batch.batch, entropies=policy.entropy_weight != 0, reference=policy.exact_kl_reference)
        return policy.loss(tokens, batch, size)

    return accumulate(engine, minibatch, limits, loss)

"""What a next-token distribution says of sampled replies: log-probability of each token, entropy, exact KL.

The distribution is a row of the vocabulary's size for every position, the result a few numbers. Where the rows of a
batch would not fit into ``limit`` bytes, they are computed in chunks (see :mod:`rlhf_core.models.lazy_logits`), and at
the tokens of replies only, not at their padding. Within the limit they are computed as a whole.

Shapes: B sequences, T response positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.models.lazy_logits import LOGITS_BYTES, LazyLogits, compute_in_chunks
from rlhf_core.sampling.distribution import Sampling, log_distribution, log_distribution_at
from rlhf_core.sampling.token_scoring import Tokens


@dataclass(frozen=True)
class TokenStatistics:
    """Numbers per response position, each (B, T). Masked positions may hold anything.

    Attributes:
        logprobs: Log-probability of each response token.
        entropy: Entropy of each distribution in nats, where it was asked for.
        ref_logprobs: Log-probability of each token under a reference, where one was given.
        full_kl: Exact KL to the reference over the vocabulary in nats, where it was asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    ref_logprobs: Tensor | None = None
    full_kl: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Those that were asked for, by name."""
        return {name: values for name, values in vars(self).items() if values is not None}


@dataclass(frozen=True)
class DistributionScorer:
    """Computes :class:`TokenStatistics` under one training distribution.

    Attributes:
        sampling: The training distribution.
        limit: Bytes of float32 logits that may exist at once, per model.
    """

    sampling: Sampling
    limit: int = LOGITS_BYTES

    def score(
        self,
        logits: LazyLogits,
        batch: Tokens,
        *,
        entropies: bool = False,
        reference: LazyLogits | None = None,
        exact_kl: bool = True,
    ) -> TokenStatistics:
        """Score the response tokens of ``batch``.

        Args:
            logits: Of its response positions, as :func:`~rlhf_core.sampling.token_scoring.response_logits` gives them.
            batch: The replies.
            entropies: Whether to compute entropies.
            reference: Logits of a second model at the same positions.
            exact_kl: Whether to compute the KL to the reference, over the vocabulary.
        """
        count = logits.chunks(self.limit)
        if count > 1:
            return self._score_in_chunks(logits, batch, entropies, reference, exact_kl, count)
        policy, other = log_distribution(logits.whole()[:, :-1], self.sampling), None
        if reference is logits:
            other = policy
        elif reference is not None:
            with torch.no_grad():
                other = log_distribution(reference.whole()[:, :-1], self.sampling)
        return _statistics(policy, batch.response, entropies, other, exact_kl)

    def _score_in_chunks(
        self,
        logits: LazyLogits,
        batch: Tokens,
        entropies: bool,
        reference: LazyLogits | None,
        exact_kl: bool,
        count: int,
    ) -> TokenStatistics:
        real, head = batch.real_positions, logits.repeatable_head()
        states = logits.states[:, :-1].flatten(0, 1)[real]
        ref_states, ref_head = states, head
        if reference is not None and reference is not logits:
            ref_states = reference.states[:, :-1].flatten(0, 1)[real]
            ref_head = head if reference.head is logits.head else reference.repeatable_head()
        fields = ["logprobs", *(["entropy"] if entropies else []), *(["ref_logprobs"] if reference else [])]
        fields += ["full_kl"] if reference and exact_kl else []

        def compute(tokens: Tensor, positions: Tensor, states: Tensor, ref_states: Tensor) -> tuple[Tensor, ...]:
            policy, other = log_distribution_at(head(states), positions, self.sampling), None
            if reference is logits:
                other = policy
            elif reference is not None:
                with torch.no_grad():
                    other = log_distribution_at(ref_head(ref_states), positions, self.sampling)
            statistics = _statistics(policy, tokens, entropies, other, exact_kl)
            return tuple(getattr(statistics, field) for field in fields)

        columns = (batch.response.flatten()[real], real % batch.width, states, ref_states)
        shape = batch.response_mask.shape
        values = {
            field: column.new_zeros(shape.numel()).index_copy(0, real, column).view(shape)
            for field, column in zip(fields, compute_in_chunks(compute, columns, count), strict=True)
        }
        return TokenStatistics(**values)


def _statistics(
    policy: Tensor, tokens: Tensor, entropies: bool, reference: Tensor | None, exact_kl: bool
) -> TokenStatistics:
    """The statistics of tokens (...) from one or two log-distributions (..., V)."""
    return TokenStatistics(
        logprobs=gather_logprobs(policy, tokens),
        ref_logprobs=gather_logprobs(reference, tokens) if reference is not None else None,
        full_kl=full_kl(policy, reference) if reference is not None and exact_kl else None,
        entropy=entropy(policy) if entropies else None,
    )


def gather_logprobs(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token: (..., V), (...) -> (...)."""
    return log_probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy of each next-token distribution in nats: log-distributions (..., V) -> (...)."""
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1)


def full_kl(log_probabilities: Tensor, ref_log_probabilities: Tensor) -> Tensor:
    """Exact KL over the vocabulary at every position: two log-distributions (..., V) -> (...)."""
    return (log_probabilities.exp() * (log_probabilities - ref_log_probabilities)).sum(dim=-1)

"""Metrics of a rollout that tell health from collapse (algorithms.md §8; paper, section 5.2).

They are computed from the rollout alone, before the update that it feeds, and may be NaN, which the health monitor
wants to see. No judge is asked but the learned ones: a user without a gold standard has all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_core.data.correlation import rank_correlation
from rlhf_core.data.text import text_statistics
from rlhf_core.models.precision import Precision
from rlhf_core.ppo.advantages.gae import explained_variance
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses.importance_sampling import initial_ratio
from rlhf_core.ppo.losses.loss_reduction import masked_mean, sequence_sums
from rlhf_core.ppo.metrics import MetricRecord
from rlhf_core.ppo.rollouts.sampler_agreement import SamplerAgreement

SHORT_TOKENS = 4


@dataclass(frozen=True)
class RewardMetrics(MetricRecord):
    """The distribution of raw rewards. ``reward_tail`` is median - 5th percentile: a long lower tail is where the
    paper's collapsing runs showed first."""

    reward_mean: float
    reward_std: float
    reward_min: float
    reward_max: float
    reward_p05: float
    reward_p25: float
    reward_p50: float
    reward_p75: float
    reward_p95: float
    reward_tail: float

    @staticmethod
    @np.errstate(invalid="ignore")  # rewards that are not finite give NaN without a warning of NumPy's
    def of(rewards: Tensor) -> RewardMetrics:
        """Describe raw rewards (B,)."""
        values = _numpy(rewards)
        p05, p25, p50, p75, p95 = (float(np.percentile(values, p)) for p in (5, 25, 50, 75, 95))
        return RewardMetrics(
            float(values.mean()), float(values.std()), float(values.min()), float(values.max()),
            p05, p25, p50, p75, p95, reward_tail=p50 - p05,
        )  # fmt: skip


@dataclass(frozen=True)
class DriftMetrics(MetricRecord):
    """KL estimates to the reference in nats per sequence, and perplexities per token.

    With d = logprob - ref_logprob: ``kl`` is the mean over sequences of sum d (k1), ``kl_k2`` of sum d²/2, ``kl_k3`` of
    sum (exp(-d) - 1 + d). ``perplexity`` is the policy's on its own replies, ``perplexity_reference`` the reference's.
    """

    kl: float
    kl_k2: float
    kl_k3: float
    kl_per_token: float
    perplexity: float
    perplexity_reference: float

    @staticmethod
    def of(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> DriftMetrics:
        """Measure drift by the log-probabilities (B, T) of sampled tokens under policy and reference, in nats."""
        mask, logprobs, ref_logprobs = mask.bool(), logprobs.double(), ref_logprobs.double()
        difference = (logprobs - ref_logprobs).masked_fill(~mask, 0.0)
        third = torch.exp(-difference) - 1.0 + difference
        return DriftMetrics(
            kl=float(sequence_sums(difference, mask).mean()),
            kl_k2=float(sequence_sums(difference.square() / 2, mask).mean()),
            kl_k3=float(sequence_sums(third, mask).mean()),
            kl_per_token=float(masked_mean(difference, mask)),
            perplexity=float(np.exp(-float(masked_mean(logprobs, mask)))),
            perplexity_reference=float(np.exp(-float(masked_mean(ref_logprobs, mask)))),
        )


@dataclass(frozen=True)
class ReplyMetrics(MetricRecord):
    """What the replies look like: lengths in tokens with the end marker, and statistics of their text."""

    length: float
    length_p95: float
    repetition: float
    distinct_2: float
    missing_eos: float
    short_replies: float
    distinct_first_sentences: float
    commonest_first_sentence: float
    commonest_reply: float
    refusals: float

    @staticmethod
    def of(replies: Sequence[str], lengths: Sequence[int], finished: Sequence[bool]) -> ReplyMetrics:
        """Describe decoded replies without their end markers."""
        return ReplyMetrics(
            length=float(np.mean(lengths)),
            length_p95=float(np.percentile(lengths, 95)),
            repetition=text_statistics.mean_repetition(replies),
            distinct_2=text_statistics.distinct_n(replies, 2),
            missing_eos=text_statistics.missing_eos_rate(finished),
            short_replies=text_statistics.short_reply_rate(lengths, SHORT_TOKENS),
            distinct_first_sentences=text_statistics.distinct_first_sentences(replies),
            commonest_first_sentence=text_statistics.commonest_first_sentence(replies)[1],
            commonest_reply=text_statistics.commonest_reply(replies),
            refusals=text_statistics.refusal_rate(replies),
        )


@dataclass(frozen=True)
class RolloutMetrics(MetricRecord):
    """All metrics of one rollout; those of referee, critic and exact KL only where they were asked."""

    rewards: RewardMetrics
    drift: DriftMetrics
    replies: ReplyMetrics
    kl_full: float | None
    entropy: float
    reward_length_correlation: float
    reward_treated: float
    explained_variance: float | None
    first_ratio: float
    sampler: SamplerAgreement
    referee_mean: float | None = None
    reward_referee_correlation: float | None = None

    @staticmethod
    def of(
        experience: Experience,
        replies: Sequence[str],
        referee_rewards: Tensor | None = None,
        precision: Precision = "float32",
        with_critic: bool = True,
        with_exact_kl: bool = True,
    ) -> RolloutMetrics:
        """Measure a rollout with rewards and advantages.

        Args:
            experience: The rollout.
            replies: Its replies as text, without end markers.
            referee_rewards: The referee's rewards (B,) of the same replies.
            precision: The policy's, by which sampler and trainer are compared.
            with_critic: Whether a critic gave values.
            with_exact_kl: Whether the KL over the vocabulary was computed.
        """
        mask, rewards, lengths = experience.response_mask, experience.rewards, experience.lengths
        sampler, trainer = experience.sampler_logprobs, experience.policy_logprobs
        return RolloutMetrics(
            rewards=RewardMetrics.of(rewards),
            drift=DriftMetrics.of(experience.policy_logprobs, experience.ref_logprobs, mask),
            replies=ReplyMetrics.of(replies, lengths.tolist(), experience.finished.tolist()),
            kl_full=float(sequence_sums(experience.full_kl, mask).mean()) if with_exact_kl else None,
            entropy=float(masked_mean(experience.entropy.double(), mask)),
            reward_length_correlation=rank_correlation(_numpy(rewards), _numpy(lengths)),
            reward_treated=float(experience.shaped_rewards.mean()),
            explained_variance=(
                explained_variance(experience.values, experience.monte_carlo_returns, mask) if with_critic else None
            ),
            first_ratio=initial_ratio(experience),
            sampler=SamplerAgreement.of(sampler, trainer, mask, precision),
            referee_mean=None if referee_rewards is None else float(referee_rewards.double().mean()),
            reward_referee_correlation=(
                None if referee_rewards is None else rank_correlation(_numpy(rewards), _numpy(referee_rewards))
            ),
        )


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()

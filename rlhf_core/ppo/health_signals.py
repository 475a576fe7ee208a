"""Signals that tell health from collapse, one set per PPO iteration (algorithms.md §8; paper, section 5.2).

They are computed from the rollout alone, before the update that it feeds. Nothing here knows a judge beyond the
learned ones: a user without a gold standard has every signal that the rules read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_core.data import text_statistics
from rlhf_core.data.correlation import rank_correlation

REWARD_PERCENTILES = (5, 25, 50, 75, 95)
SHORT_TOKENS = 4


def signals(
    *,
    scores: Tensor,
    response_mask: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    replies: Sequence[str],
    finished: Tensor | Sequence[bool],
    entropies: Tensor | None = None,
    referee_scores: Tensor | None = None,
    update: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """All signals of one iteration as plain numbers (which may be NaN: the monitor wants to see that).

    ``scores`` (B,) raw reward-model scores; ``response_mask`` (B, T), 1 on response tokens with the EOS; ``logprobs``
    and ``ref_logprobs`` (B, T) of the sampled tokens under policy and reference, in nats; ``entropies`` (B, T) in nats
    per token; ``replies`` decoded without EOS; ``finished`` (B,); ``referee_scores`` (B,) of the same replies;
    ``update`` the figures of the optimiser steps, taken over as they are.
    """
    lengths = response_mask.sum(dim=1)
    found = reward_signals(scores) | drift_signals(logprobs, ref_logprobs, response_mask)
    found |= reply_signals(replies, lengths.tolist(), [bool(f) for f in finished])
    found["length_p95"] = float(np.percentile(_numpy(lengths), 95))
    found["reward_length_correlation"] = rank_correlation(_numpy(scores), _numpy(lengths))
    if entropies is not None:
        found["entropy"] = masked_mean(entropies, response_mask)
    if referee_scores is not None:
        found["referee_mean"] = float(referee_scores.double().mean())
        found["reward_referee_correlation"] = rank_correlation(_numpy(scores), _numpy(referee_scores))
    return found | {name: float(value) for name, value in (update or {}).items()}


@np.errstate(invalid="ignore")  # scores that are not finite give NaN, without a word from NumPy
def reward_signals(scores: Tensor) -> dict[str, float]:
    """Mean, spread and percentiles of raw scores (B,). ``reward_tail`` is median - 5th percentile: a long lower tail
    is where the paper's collapsing runs showed first."""
    values = _numpy(scores)
    names = {f"reward_p{p:02d}": float(np.percentile(values, p)) for p in REWARD_PERCENTILES}
    return {
        "reward_mean": float(values.mean()),
        "reward_std": float(values.std()),
        "reward_min": float(values.min()),
        "reward_max": float(values.max()),
        **names,
        "reward_tail": names["reward_p50"] - names["reward_p05"],
    }


def drift_signals(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """KL estimates in nats per sequence and perplexities per token, from (B, T) log-probs of sampled tokens.

    With d = logprob - ref_logprob: ``kl`` is the mean over sequences of sum d (k1), ``kl_k2`` of sum d²/2, ``kl_k3`` of
    sum (exp(-d) - 1 + d). ``perplexity`` is the policy's on its own replies, ``perplexity_reference`` the reference's.
    """
    keep = mask.bool()
    difference = (logprobs.double() - ref_logprobs.double()).masked_fill(~keep, 0.0)
    third = (torch.exp(-difference) - 1.0 + difference).masked_fill(~keep, 0.0)
    return {
        "kl": float(difference.sum(dim=1).mean()),
        "kl_k2": float((difference.square() / 2).sum(dim=1).mean()),
        "kl_k3": float(third.sum(dim=1).mean()),
        "kl_per_token": masked_mean(difference, mask),
        "perplexity": float(np.exp(-masked_mean(logprobs, mask))),
        "perplexity_reference": float(np.exp(-masked_mean(ref_logprobs, mask))),
    }


def reply_signals(replies: Sequence[str], lengths: Sequence[int], finished: Sequence[bool]) -> dict[str, float]:
    """What the replies look like as text; ``lengths`` in tokens with the EOS."""
    return {
        "length": float(np.mean(lengths)),
        "repetition": text_statistics.mean_repetition(replies),
        "distinct_2": text_statistics.distinct_n(replies, 2),
        "missing_eos": text_statistics.missing_eos_rate(finished),
        "short_replies": text_statistics.short_reply_rate(lengths, SHORT_TOKENS),
        "distinct_first_sentences": text_statistics.distinct_first_sentences(replies),
        "commonest_first_sentence": text_statistics.commonest_first_sentence(replies)[1],
        "commonest_reply": text_statistics.commonest_reply(replies),
        "refusals": text_statistics.refusal_rate(replies),
    }


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean of (B, T) ``values`` where ``mask`` is 1, 0 if nowhere. Masked values never matter, not even NaN."""
    keep = mask.bool()
    count = int(keep.sum())
    return float(values.double().masked_fill(~keep, 0.0).sum()) / count if count else 0.0


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()

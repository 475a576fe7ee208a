"""Metrics of a rollout by hand, and that masked positions never matter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.rollout import drift_metrics, reward_distribution, rollout_metrics

MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, 99.0, math.nan]])
REFERENCE = torch.tensor([[-1.5, -1.0, -0.5], [-2.5, -99.0, math.nan]])


def test_kl_is_summed_over_tokens_and_averaged_over_sequences() -> None:
    found = drift_metrics(LOGPROBS, REFERENCE, MASK)
    # d: .5, -1, 0 and 1.
    assert found["kl"] == pytest.approx((-0.5 + 1.0) / 2)
    assert found["kl_k2"] == pytest.approx((0.125 + 0.5 + 0.0 + 0.5) / 2)
    k3 = [math.exp(-d) - 1 + d for d in (0.5, -1.0, 0.0, 1.0)]
    assert found["kl_k3"] == pytest.approx(sum(k3) / 2)
    assert found["kl_per_token"] == pytest.approx(0.5 / 4)
    assert found["perplexity"] == pytest.approx(math.exp(5.0 / 4))
    assert found["perplexity_reference"] == pytest.approx(math.exp(5.5 / 4))


def test_reward_distribution() -> None:
    found = reward_distribution(torch.arange(101.0))
    assert (found["reward_p05"], found["reward_p50"], found["reward_p95"]) == (5.0, 50.0, 95.0)
    assert found["reward_mean"] == 50.0 and found["reward_tail"] == 45.0
    assert found["reward_std"] == pytest.approx(np.arange(101).std())


def test_all_metrics_of_a_rollout() -> None:
    unread = torch.zeros(2, 3)
    fields: dict[str, Any] = dict.fromkeys(Experience.__dataclass_fields__, unread)
    fields |= {
        "response_mask": MASK.bool(),
        "finished": torch.tensor([True, False]),
        "sampler_logprobs": LOGPROBS + 0.25,
        "policy_logprobs": LOGPROBS,
        "old_logprobs": LOGPROBS,
        "ref_logprobs": REFERENCE,
        "full_kl": torch.tensor([[0.1, 0.2, 0.3], [0.4, 50.0, math.nan]]),
        "entropy": torch.tensor([[1.0, 2.0, 3.0], [2.0, 50.0, math.nan]]),
        "values": torch.tensor([[1.0, 2.0, 3.0], [4.0, 50.0, math.nan]]),
        "rewards": torch.tensor([2.0, 1.0]),
        "shaped_rewards": torch.tensor([0.5, -1.0]),
        "monte_carlo_returns": torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]]),
    }
    metrics = rollout_metrics(Experience(**fields), ["a b", ""], torch.tensor([0.5, 0.1]))
    assert metrics["length"] == 2.0 and metrics["missing_eos"] == 0.5 and metrics["short_replies"] == 1.0
    assert metrics["length_p95"] == pytest.approx(2.9) and metrics["reward_mean"] == 1.5
    assert metrics["entropy"] == 2.0 and metrics["kl_full"] == pytest.approx((0.6 + 0.4) / 2)
    assert metrics["reward_length_correlation"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["reward_referee_correlation"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["referee_mean"] == pytest.approx(0.3) and metrics["reward_treated"] == -0.25
    assert metrics["explained_variance"] == 1.0 and metrics["first_ratio"] == 1.0 and metrics["sampler_gap"] == 0.25
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    alone = rollout_metrics(Experience(**fields), ["a b", ""])
    assert metrics.keys() - alone.keys() == {"referee_mean", "reward_referee_correlation"}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_padding_columns_change_nothing(seed: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, reference = -torch.rand(4, 5, generator=generator), -torch.rand(4, 5, generator=generator)
    lengths = torch.randint(1, 6, (4,), generator=generator)
    mask = (torch.arange(5) < lengths[:, None]).long()
    wide = [torch.cat([t, torch.full((4, extra), fill)], dim=1) for t, fill in ((logprobs, 7.0), (reference, -9.0))]
    wide_mask = torch.cat([mask, torch.zeros(4, extra, dtype=torch.long)], dim=1)
    assert drift_metrics(*wide, wide_mask) == pytest.approx(drift_metrics(logprobs, reference, mask))

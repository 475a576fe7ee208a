"""Signals by hand, and that masked positions never matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.ppo import health_signals as health

MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, 99.0, math.nan]])
REFERENCE = torch.tensor([[-1.5, -1.0, -0.5], [-2.5, -99.0, math.nan]])


def test_kl_is_summed_over_tokens_and_averaged_over_sequences() -> None:
    found = health.drift_signals(LOGPROBS, REFERENCE, MASK)
    # d: .5, -1, 0 and 1.
    assert found["kl"] == pytest.approx((-0.5 + 1.0) / 2)
    assert found["kl_k2"] == pytest.approx((0.125 + 0.5 + 0.0 + 0.5) / 2)
    k3 = [math.exp(-d) - 1 + d for d in (0.5, -1.0, 0.0, 1.0)]
    assert found["kl_k3"] == pytest.approx(sum(k3) / 2)
    assert found["kl_per_token"] == pytest.approx(0.5 / 4)
    assert found["perplexity"] == pytest.approx(math.exp(5.0 / 4))
    assert found["perplexity_reference"] == pytest.approx(math.exp(5.5 / 4))


def test_reward_distribution() -> None:
    found = health.reward_signals(torch.arange(101.0))
    assert (found["reward_p05"], found["reward_p50"], found["reward_p95"]) == (5.0, 50.0, 95.0)
    assert found["reward_mean"] == 50.0 and found["reward_tail"] == 45.0
    assert found["reward_std"] == pytest.approx(np.arange(101).std())


def test_all_signals_of_a_rollout() -> None:
    found = health.signals(
        scores=torch.tensor([2.0, 1.0]),
        response_mask=MASK,
        logprobs=LOGPROBS,
        ref_logprobs=REFERENCE,
        replies=["a b", ""],
        finished=torch.tensor([True, False]),
        entropies=torch.tensor([[1.0, 2.0, 3.0], [2.0, 50.0, math.nan]]),
        referee_scores=torch.tensor([0.5, 0.1]),
        update={"clip_fraction": 0.01},
    )
    assert found["length"] == 2.0 and found["missing_eos"] == 0.5 and found["short_replies"] == 1.0
    assert found["entropy"] == 2.0
    assert found["reward_length_correlation"] == pytest.approx(1.0, abs=1e-12)
    assert found["reward_referee_correlation"] == pytest.approx(1.0, abs=1e-12)
    assert found["referee_mean"] == pytest.approx(0.3)
    assert found["clip_fraction"] == 0.01
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_padding_columns_change_nothing(seed: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, reference = -torch.rand(4, 5, generator=generator), -torch.rand(4, 5, generator=generator)
    lengths = torch.randint(1, 6, (4,), generator=generator)
    mask = (torch.arange(5) < lengths[:, None]).long()
    wide = [torch.cat([t, torch.full((4, extra), fill)], dim=1) for t, fill in ((logprobs, 7.0), (reference, -9.0))]
    wide_mask = torch.cat([mask, torch.zeros(4, extra, dtype=torch.long)], dim=1)
    assert health.drift_signals(*wide, wide_mask) == pytest.approx(health.drift_signals(logprobs, reference, mask))

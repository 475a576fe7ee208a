"""Truncated importance weights between sampler and trainer: numbers by hand, when they apply, what they report.

The loss with them is compared with the oracle in ``test_oracle.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.ppo.tensors import NAN, close, t
from unit.ppo.tiny import Tiny, accumulate_gradients, collect, make_config, make_learner, make_tiny

from rlhf_core.config.ppo import ImportanceSamplingCorrectionConfig
from rlhf_core.models.precision import Precision
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import correction_cap, truncated_weights


def test_weights_by_hand() -> None:
    """exp(0.2), exp(-0.5), exp(1.5) = 4.48 capped at 2; a masked position counts as 1 whatever it holds."""
    trainer, sampler = t([-1.0, -2.0, -0.5, NAN]), t([-1.2, -1.5, -2.0, 9.0])
    mask = torch.tensor([[True, True, True, False]])
    weights = truncated_weights(trainer.requires_grad_(), sampler, mask, 2.0)
    assert close(weights, [[math.exp(0.2), math.exp(-0.5), 2.0, 1.0]])
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("mode", "precision", "cap"),
    [
        ("auto", "float32", None),
        ("auto", "float64", None),
        ("auto", "tf32", 3.0),
        ("auto", "bfloat16", 3.0),
        ("always", "float32", 3.0),
        ("never", "bfloat16", None),
    ],
)
def test_it_is_applied_where_sampler_and_trainer_round_differently(
    mode: Any, precision: Precision, cap: float | None
) -> None:
    config = ImportanceSamplingCorrectionConfig(mode=mode, **({} if mode == "never" else {"cap": 3.0}))
    assert correction_cap(config, precision) == cap


def gradients(experience: Experience, correction: dict[str, Any]) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The policy's loss and gradients, without ptx."""
    tiny = make_tiny()
    learner = make_learner(tiny, make_config(ptx={"weight": 0.0}, importance_sampling_correction=correction))
    metrics = accumulate_gradients(learner, experience, 0.0, 0.0)
    return metrics, [p.grad for p in tiny.policy.parameters() if p.grad is not None]


def test_the_gradient_of_a_token_is_scaled_by_its_weight(tiny: Tiny) -> None:
    """A sampler that gave every token half the probability doubles the loss, up to the cap, and nothing else."""
    experience = collect(tiny, make_config())
    halved = replace(experience, sampler_logprobs=experience.policy_logprobs - torch.tensor(2.0).log())
    plain, without = gradients(halved, {"mode": "never"})
    twice, corrected = gradients(halved, {"mode": "always", "cap": 4.0})
    capped, at_cap = gradients(halved, {"mode": "always", "cap": 1.5})
    assert twice["policy_loss"] == pytest.approx(2 * plain["policy_loss"], abs=1e-6)
    for one, two, half in zip(without, corrected, at_cap, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(half, 1.5 * one, rtol=1e-4, atol=1e-7)
    assert twice["importance_sampling_ratio_mean"] == pytest.approx(2.0, abs=1e-5)
    assert [found["importance_sampling_ratio_capped"] for found in (twice, capped)] == [0.0, 1.0]
    assert "importance_sampling_ratio_mean" not in plain

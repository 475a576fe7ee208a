"""Running moments, transforms, penalties and token rewards, by hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch
from unit.ppo.tensors import NAN, close, t

from rlhf_core.config.ppo import RewardShapingConfig
from rlhf_core.errors import DataError
from rlhf_core.ppo.rewards import RunningMeanStd, apply_penalties, normalize_and_clip_rewards, token_rewards


def test_running_moments_equal_those_of_all_scores_at_once() -> None:
    moments = RunningMeanStd()
    scores = torch.randn(97, generator=torch.Generator().manual_seed(0)).double() * 3 + 1
    for part in scores.split([1, 30, 5, 61]):
        moments.update(part)
    assert moments.count == 97
    assert moments.mean == pytest.approx(float(scores.mean()), abs=1e-12)
    assert moments.std == pytest.approx(float(scores.std()), abs=1e-12)


def test_running_moments_leave_out_what_is_not_finite() -> None:
    moments = RunningMeanStd()
    moments.update(t(1.0, NAN, 3.0, math.inf))
    assert (moments.count, moments.mean, moments.std) == (2, 2.0, pytest.approx(math.sqrt(2)))
    moments.update(t(NAN))
    assert moments.count == 2


def test_running_moments_floor() -> None:
    moments = RunningMeanStd()
    assert moments.std == 1.0
    moments.update(t(5.0))
    assert moments.std == 1.0
    moments.update(t(5.0, 5.0))
    assert moments.std == 1.0
    third = RunningMeanStd()
    third.update(torch.full((7,), 0.1))
    third.update(torch.full((3,), 0.1))
    assert third.std == 1.0


@pytest.mark.parametrize("level", [0.1, 3.7, -250.0])
def test_equal_float32_rewards_with_rounding_noise_count_as_equal(level: float) -> None:
    """A reward model gives equal replies equal scores up to its accumulation error, a few units in the last place.

    Divided by the spread of that noise they would become rewards of size 1 that mean nothing.
    """
    unit = abs(level) * 2.0**-23
    steps = torch.tensor([0, 1, -3, 2, -1, 5, -8, 8])
    noisy = (level + steps.double() * unit).float()
    assert float(noisy.double().std()) > 0
    moments = RunningMeanStd()
    moments.update(noisy)
    assert moments.std == 1.0
    normalized = normalize_and_clip_rewards(noisy, moments, RewardShapingConfig())
    assert float(normalized.abs().max()) < 1e-3


def test_a_small_but_real_spread_is_no_rounding_noise() -> None:
    moments = RunningMeanStd()
    moments.update(torch.tensor([1.0, 1.001]))
    assert moments.std == pytest.approx(0.001 / math.sqrt(2), rel=1e-3)


def test_moments_survive_json() -> None:
    moments = RunningMeanStd()
    moments.update(t(0.1, 0.7, -2.0))
    assert RunningMeanStd.from_dict(moments.to_dict()) == moments
    with pytest.raises(DataError, match="critic stage"):
        RunningMeanStd.from_dict({"count": 1})


@pytest.mark.parametrize(
    ("transform", "clip", "expected"),
    [("none", None, [5.0, -1.0]), ("scale", None, [2.5, -0.5]), ("normalize", None, [2.0, -1.0]),
     ("normalize", 1.5, [1.5, -1.0]), ("none", 0.5, [0.5, -0.5])],
)  # fmt: skip
def test_transform_and_clip(transform: str, clip: float | None, expected: list[float]) -> None:
    moments = RunningMeanStd(5, 1.0, 3.2)  # sample standard deviation 2
    config = RewardShapingConfig(transform=transform, clip=clip)  # type: ignore[arg-type]
    assert close(normalize_and_clip_rewards(t(5.0, -1.0), moments, config), expected)


def test_the_clip_makes_no_reward_of_a_score_that_is_not_finite() -> None:
    got = normalize_and_clip_rewards(t(math.inf, -math.inf, NAN, 1.0), RunningMeanStd(), RewardShapingConfig())
    assert close(got, [NAN, NAN, NAN, 1.0])


def test_shaping_is_in_standard_deviations() -> None:
    config = RewardShapingConfig(missing_eos_penalty=0.5, length_penalty=0.2)
    shaped = apply_penalties(t(1.0, 1.0), torch.tensor([32, 64]), torch.tensor([True, False]), config, 64)
    assert close(shaped, [0.9, 0.3])


def test_score_sits_on_the_last_response_token() -> None:
    """Trap 3: at the last response token (the end marker included), not one past it."""
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    rewards = token_rewards(t(3.0, 5.0), mask, torch.full((2, 4), NAN, dtype=torch.float64), 0.0)
    assert close(rewards, [[0, 3, 0, 0], [0, 0, 0, 5]])


def test_masked_kl_never_enters_the_reward() -> None:
    mask = torch.tensor([[True, False]])
    assert close(token_rewards(t(1.0), mask, t([0.5, NAN]), 0.1), [[0.95, 0.0]])

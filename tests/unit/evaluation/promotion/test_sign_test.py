"""The exact sign test by hand, and the error budget of repeated attempts by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rlhf_core.evaluation.statistics import level_of_attempt, sign_test

PROMPTS, ATTEMPTS, WORLDS, BUDGET = 320, 30, 2000, 0.05


@pytest.mark.parametrize(
    ("wins", "ties", "losses", "bar", "expected"),
    [
        (5, 0, 0, 0.5, 1 / 32),
        (5, 40, 0, 0.5, 1 / 32),  # ties are set aside
        (4, 0, 1, 0.5, 6 / 32),  # C(5, 4) + C(5, 5)
        (0, 9, 0, 0.5, 1.0),
        (0, 0, 3, 0.5, 1.0),
        (3, 0, 0, 0.8, 0.8**3),
        # At a win rate of 0.75 with 4 ties of 12, 9 - 2 = 7 of the 8 decided prompts are won.
        (8, 4, 0, 0.75, (7 / 8) ** 8),
        (8, 4, 0, 0.95, 1.0),  # with 4 ties the win rate is 10 / 12 at most
        (2, 8, 0, 0.3, 0.0),  # with 8 ties the win rate is 4 / 10 at least
        (0, 8, 2, 0.3, 1.0),
    ],
)
def test_by_hand(wins: int, ties: int, losses: int, bar: float, expected: float) -> None:
    assert sign_test(wins, ties, losses, bar) == pytest.approx(expected)


def test_the_levels_by_hand() -> None:
    assert [level_of_attempt(0.06, attempt) for attempt in (1, 2, 3)] == pytest.approx([0.03, 0.01, 0.005])
    assert sum(level_of_attempt(BUDGET, attempt) for attempt in range(1, 31)) == pytest.approx(BUDGET * 30 / 31)
    with pytest.raises(ValueError, match="counted from 1"):
        level_of_attempt(0.05, 0)


@given(st.floats(0.001, 1), st.integers(1, 300))
def test_the_budget_is_never_exceeded(budget: float, attempts: int) -> None:
    levels = [level_of_attempt(budget, attempt) for attempt in range(1, attempts + 1)]
    assert sum(levels) < budget and levels == sorted(levels, reverse=True)


def test_false_promotions_over_thirty_attempts_stay_within_the_budget() -> None:
    """Challengers that are exactly as good as the champion, all tried on the same prompts.

    Prompts favour challengers or the champion, half of them each in the long run: what the drawn prompts favour by luck
    every attempt profits from, so attempts depend on one another.
    """
    random = np.random.default_rng(1)
    favoured = random.binomial(PROMPTS, 0.5, size=(WORLDS, 1))
    shape = (WORLDS, ATTEMPTS)
    wins = random.binomial(favoured, 0.7, size=shape) + random.binomial(PROMPTS - favoured, 0.3, size=shape)
    p_of_wins = np.array([sign_test(count, 0, PROMPTS - count) for count in range(PROMPTS + 1)])
    p_values = p_of_wins[wins]
    levels = np.array([level_of_attempt(BUDGET, attempt) for attempt in range(1, ATTEMPTS + 1)])
    promoted_without_budget = (p_values <= BUDGET / 2).any(axis=1).mean()
    promoted = (p_values <= levels).any(axis=1).mean()
    assert promoted_without_budget > 0.2
    assert 0.01 < promoted <= BUDGET
    assert p_of_wins[200] == pytest.approx(stats.binom.sf(199, PROMPTS, 0.5))


@pytest.mark.parametrize(("sets", "within_budget"), [(1, False), (8, True)])
def test_prompts_that_challengers_were_made_for_break_the_budget_unless_sets_rotate(
    sets: int, within_budget: bool
) -> None:
    """Challengers no better than the champion, but each time better by 4 % on prompts that were played on before."""
    random = np.random.default_rng(2)
    promoted = np.zeros(WORLDS, dtype=bool)
    for attempt in range(1, 9):
        played_before = (attempt - 1) // sets
        wins = random.binomial(PROMPTS, 0.5 + 0.04 * played_before, size=WORLDS)
        threshold = stats.binom.isf(level_of_attempt(BUDGET, attempt), PROMPTS, 0.5)
        promoted |= wins > threshold
    assert (promoted.mean() <= BUDGET) == within_budget

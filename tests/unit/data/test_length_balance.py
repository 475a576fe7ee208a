"""Length-balanced pairs: as many of either kind, at every size of the difference."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.batches import length_balanced_epoch, length_balanced_rows

DIFFERENCES = st.lists(st.integers(-30, 30), max_size=400)


def test_the_rarer_kind_is_kept_whole_and_matched() -> None:
    # 7 pairs are one stratum: three prefer the shorter reply, three the longer one, one is a tie.
    assert length_balanced_rows([5, -3, 0, 2, -8, 1, -1], seed=1) == [0, 1, 3, 4, 5, 6]
    rows = length_balanced_rows([5, -3, 0, 2, -8, 1, 7, 9], seed=1)
    assert {1, 4} < set(rows) and len(rows) == 4 and 2 not in rows


@given(DIFFERENCES, st.integers(0, 2**40), st.integers(0, 50))
def test_preferring_the_longer_is_right_in_exactly_half(differences: list[int], seed: int, draw: int) -> None:
    rows = length_balanced_rows(differences, seed, draw)
    drawn = [differences[i] for i in rows]
    assert sum(d > 0 for d in drawn) == sum(d < 0 for d in drawn) == len(rows) / 2
    assert rows == sorted(set(rows)) == length_balanced_rows(differences, seed, draw)


def test_no_threshold_on_the_difference_beats_chance_by_much() -> None:
    # The longer reply is preferred the more often the longer it is, as people do: always beyond 200 tokens.
    generator = np.random.default_rng(0)
    size = generator.integers(1, 400, 4000)
    longer = generator.random(4000) < np.minimum(0.5 + size / 400, 1.0)
    difference = np.where(longer, size, -size)

    def best_rule(rows: np.ndarray) -> float:
        """The highest accuracy of "the longer one if it is longer by t, else the shorter one"."""
        drawn = difference[rows]
        return max(float((np.where(abs(drawn) >= t, drawn, -drawn) > 0).mean()) for t in range(0, 400, 5))

    shorter = np.flatnonzero(~longer)
    equal_numbers = np.concatenate([shorter, generator.permutation(np.flatnonzero(longer))[: len(shorter)]])
    assert best_rule(equal_numbers) > 0.7
    assert best_rule(np.array(length_balanced_rows(difference, seed=3))) < 0.56


def test_seed_and_draw_change_which_of_the_commoner_kind_are_drawn() -> None:
    differences = [1] * 30 + [-1] * 10
    draws = [length_balanced_rows(differences, seed, draw) for seed, draw in ((1, 0), (1, 1), (2, 0))]
    assert len({tuple(rows) for rows in draws}) == 3
    assert all(set(range(30, 40)) <= set(rows) for rows in draws)


def test_pairs_of_one_kind_cannot_be_balanced() -> None:
    assert length_balanced_rows([], 1) == length_balanced_rows([0, 0], 1) == length_balanced_rows([3] * 90, 1) == []


def test_an_epoch_has_all_pairs_of_equal_length() -> None:
    rows = length_balanced_epoch([0, 4, 0, -4, 9], seed=1, epoch=2)
    assert {0, 2, 3} < set(rows) and len(rows) == 4

"""Mixtures by category: shares by hand, every row as often as any other of its category, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.batches import rows_by_category_share
from rlhf_core.data.pairs import TokenisedPair
from rlhf_core.errors import DataError
from rlhf_core.training.reward.trainer import rows_of_epoch

# Rows 0 to 79 are general, 80 to 89 harmless, 90 to 99 rude.
CATEGORIES = ["general"] * 80 + ["harmless"] * 10 + ["rude"] * 10


def mixture(shares: dict[str, float], epoch: int = 0, **more: list[int]) -> list[int]:
    return rows_by_category_share(CATEGORIES, shares, 7, epoch, "reward.category_shares", **more)


def test_a_category_is_repeated_until_it_has_its_share() -> None:
    # 90 others are 3/4 of 120: ten harmless rows make 30, three times each.
    assert Counter(mixture({"harmless": 0.25})) == Counter([*range(80), *range(90, 100), *[*range(80, 90)] * 3])


def test_what_is_left_of_a_share_is_drawn_anew_in_each_epoch() -> None:
    # 80 others are half of 160: harmless 40 of them, and of the rude 40 too; with 0.28 and 0.22, 44.8 and 35.2.
    counts = [Counter(mixture({"harmless": 0.28, "rude": 0.22}, epoch)) for epoch in (0, 1)]
    for count in counts:
        assert all(count[row] == 1 for row in range(80))
        assert sorted(count[row] for row in range(80, 90)) == [4] * 5 + [5] * 5
        assert sorted(count[row] for row in range(90, 100)) == [3] * 5 + [4] * 5
    assert counts[0] != counts[1]
    assert mixture({"harmless": 0.28, "rude": 0.22}) == sorted(counts[0].elements()), "a function of seed and epoch"


def test_a_small_share_draws_fewer_rows_than_there_are() -> None:
    # 90 others are 0.95 of 94.7: five harmless rows.
    rows = mixture({"harmless": 0.05})
    assert len([row for row in rows if 80 <= row < 90]) == len(set(rows) & set(range(80, 90))) == 5


def test_rows_are_chosen_from_those_that_are_given() -> None:
    assert Counter(mixture({"harmless": 0.5}, rows=[3, 4, 85])) == {3: 1, 4: 1, 85: 2}
    assert mixture({}, rows=[85, 3]) == [85, 3]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"harmles": 0.2}, "reward.category_shares names the category harmles, .*; there are: general, harmless, rude"),
        ({"general": 0.2, "harmless": 0.2, "rude": 0.2}, "names all categories"),
    ],
)
def test_shares_that_no_rows_can_fill_are_refused(shares: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        mixture(shares)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"harmless": 1.0}, "the share of harmless is 1; it must be above 0 and below 1"),
        ({"harmless": 0.0}, "the share of harmless is 0;"),
        ({"harmless": float("nan")}, "a finite number"),
        ({"harmless": 0.6, "rude": 0.4}, "add up to 1, which leaves nothing"),
    ],
)
def test_shares_out_of_range_are_refused(shares: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(category_shares=shares)


def test_a_mixture_of_no_ptx_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="category_shares mixes the ptx texts, but weight is 0"):
        PpoConfig.model_validate({"ptx": {"weight": 0.0, "category_shares": {"harmless": 0.17}}})


def test_a_mixture_of_two_sets_of_ptx_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="category_shares mixes the texts of one set, but data is both"):
        PpoConfig.model_validate({"ptx": {"data": "both", "category_shares": {"harmless": 0.17}}})


def test_pairs_are_balanced_by_length_within_a_category_and_then_mixed() -> None:
    """In each category one pair in four prefers the shorter reply."""

    def pair(number: int, category: str) -> TokenisedPair:
        chosen, rejected = (1, 9) if number % 4 == 0 else (9, 1)
        return TokenisedPair(number, [number], [5] * chosen, [6] * rejected, category)

    pairs = [pair(i, "harmless" if i >= 160 else "general") for i in range(200)]
    config = RewardConfig(length_balance="sampling", category_shares={"harmless": 0.5})
    rows = rows_of_epoch(pairs, config, "reward", epoch=0)
    kinds = Counter((pairs[row].category, pairs[row].length_difference > 0) for row in rows)
    # 40 of 160 general pairs prefer the shorter reply, so 80 are balanced. 20 harmless ones are, each four times.
    assert kinds == {(name, longer): 40 for name in ("general", "harmless") for longer in (True, False)}
    assert set(Counter(row for row in rows if row >= 160).values()) == {4}

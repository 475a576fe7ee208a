"""Statistics of pairs as a data team reads them, the language of rows, and correlations by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata
from validation_rows import make_row, memory_rows, row, set_of, suites_of

from rlhf_core.config.data import ValidateConfig
from rlhf_core.data.correlation import linear_correlation, rank_correlation
from rlhf_core.data.dataset import balance, length_bias
from rlhf_core.data.validation.columns import label_agreement, read_columns
from rlhf_core.data.validation.set_rules import check_set
from rlhf_core.errors import ConfigError


def agreement_of(*rows: dict[str, Any]) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        parts = memory_rows("preferences", rows).parts()
        frame, hashes = read_columns("preferences", parts, Path(folder) / "rows.arrow")
        return label_agreement(hashes, frame["margin"].array.tolist())


def pair(i: int, chosen: str, rejected: str, **changes: Any) -> dict[str, Any]:
    return make_row("preferences", i, chosen=chosen, rejected=rejected, **changes)


def test_agreement_of_labels_where_a_pair_repeats() -> None:
    agreement = agreement_of(
        *[pair(1, "a", "b"), pair(1, "a ", "b"), pair(1, "b", "a")],  # two of three
        *[pair(2, "a", "b"), pair(2, "b", "a")],  # a tie
        *[pair(3, "a", "b"), pair(3, "a\u200b", "b")],
        *[pair(4, "a", "b"), pair(4, "a", "b")],  # a copy is no second label
        *[pair(5, "a", "a"), pair(5, "a", "a")],  # no pair
    )
    assert (agreement["repeated_pairs"], agreement["contradicted_pairs"]) == (3, 2)
    assert agreement["label_agreement"] == pytest.approx((2 + 1 + 2) / 7)
    assert "label_agreement" not in agreement_of(pair(1, "a", "b"))
    assert "label_agreement" not in agreement_of(pair(1, "a", "b"), pair(1, "a", "b", category="x"))
    assert agreement_of(pair(1, "a", "b", margin=1.0), pair(1, "a", "b", margin=2.0))["repeated_pairs"] == 1


def test_length_bias_has_wilsons_interval() -> None:
    bias = length_bias([4] * 8 + [1] * 2 + [4], [1] * 8 + [4] * 2 + [4])
    # Wilson's interval of 8 in 10 with z = 1.96, by hand: (0.8 + z²/20 ± z √(0.016 + z²/400)) / (1 + z²/10).
    expected = {"share": 0.8, "low95": 0.4902, "high95": 0.9433}
    assert bias == {f"longer_preferred_{name}": pytest.approx(value, abs=1e-4) for name, value in expected.items()}
    assert length_bias([4], [4]) == {}
    assert length_bias((), ()) == {}


def test_balance_of_categories() -> None:
    assert balance({"x": 2, "y": 2}) == pytest.approx(1)
    assert balance({"x": 3, "y": 1}) == pytest.approx(0.8113, abs=1e-4)  # entropy of (3/4, 1/4) in bits
    assert balance({"x": 3}) is None


@pytest.mark.slow
def test_rows_in_another_language_are_named() -> None:
    pytest.importorskip("py3langid")
    rows = set_of(
        demonstrations=[
            row("demonstrations", 0, "train", "Could you please tell me what the weather will be like tomorrow?"),
            row("demonstrations", 1, "train", "请你告诉我明天北京的天气会怎么样，我想知道要不要带伞，谢谢。" * 2),
            row("demonstrations", 2, "train", "Oui"),
        ]
    )
    findings = check_set(rows.clean, ValidateConfig(languages=("en",)), suites_of())
    assert [(b.number, b.reason) for b in findings.breaches] == [(1, "looks like language zh")]
    assert findings.languages["demonstrations"] == Counter({"en": 1, "zh": 1, "unknown": 1})
    with pytest.raises(ConfigError, match=r"validate\.languages: english is no language"):
        check_set(rows.clean, ValidateConfig(languages=("english",)), suites_of())


PAIRS = st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=30)


def test_by_hand() -> None:
    first = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(first, np.exp(first)) == pytest.approx(1.0)
    assert rank_correlation(first, -first) == pytest.approx(-1.0)
    # d = 1, -1, 1, -1: 1 - 6 * 4 / (4 * 15) = .6
    assert rank_correlation(first, np.array([2.0, 1.0, 4.0, 3.0])) == pytest.approx(0.6)
    # deviations -1.5, -.5, .5, 1.5 and 0, 0, 0, 1 minus .25: .75 * 2 / sqrt(5 * .75)
    assert linear_correlation(first, np.array([0.0, 0.0, 0.0, 1.0])) == pytest.approx(1.5 / np.sqrt(3.75))


@given(PAIRS)
def test_ranks_with_ties_share_their_mean(pairs: list[tuple[int, int]]) -> None:
    first, second = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    expected = linear_correlation(rankdata(first), rankdata(second))
    assert rank_correlation(first, second) == pytest.approx(expected, abs=1e-12)
    assert -1.0 - 1e-12 <= expected <= 1.0 + 1e-12


@pytest.mark.parametrize("correlation", [rank_correlation, linear_correlation])
def test_constant_or_missing_values(correlation) -> None:
    first = np.array([1.0, 2.0, 3.0, 4.0])
    assert correlation(first, np.ones(4)) == 0.0
    assert correlation(first[:1], first[:1]) == 0.0 and correlation(first[:0], first[:0]) == 0.0
    holed = np.array([np.nan, 2.0, 3.0, np.inf])
    assert correlation(holed, first) == pytest.approx(1.0)

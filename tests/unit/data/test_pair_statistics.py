"""What becomes of clean rows: a group is in one split and at one model, and statistics as a data
team reads them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from validation_rows import make_row, memory_rows, row, set_of, suites_of

from rlhf_core.config.data import SplitConfig, ValidateConfig
from rlhf_core.data.dataset import KindStatistics, group_overlap, length_bias, split_parts
from rlhf_core.data.schema import (
    ROW_TYPES,
    PairUser,
    arrow_schema,
    assign,
    pair_user_of,
    split_of,
    unit_hash,
)
from rlhf_core.data.statistics import linear_correlation, rank_correlation
from rlhf_core.data.validation.set_rules import check_set
from rlhf_core.data.validation.tables import label_agreement, read_columns
from rlhf_core.errors import ConfigError
from rlhf_extras.data_card.card import balance


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
    assert (
        agreement_of(pair(1, "a", "b", margin=1.0), pair(1, "a", "b", margin=2.0))["repeated_pairs"]
        == 1
    )


def test_length_bias_has_wilsons_interval() -> None:
    bias = length_bias([4] * 8 + [1] * 2 + [4], [1] * 8 + [4] * 2 + [4], range(11))
    # Wilson's interval of 8 in 10 with z = 1.96, by hand: (0.8 + z²/20 ± z √(0.016 + z²/400)) / (1
    # + z²/10).
    expected = {"share": 0.8, "low95": 0.4902, "high95": 0.9433}
    assert bias == {
        f"longer_preferred_{name}": pytest.approx(value, abs=1e-4)
        for name, value in expected.items()
    }
    assert length_bias([4], [4], [0]) == {}
    assert length_bias((), (), ()) == {}


def test_copies_of_a_questions_label_are_no_evidence_of_length_bias() -> None:
    longer = np.array([1] * 8 + [0] * 2)
    once = length_bias(longer, 1 - longer, range(10))
    ten_times = length_bias(
        np.repeat(longer, 10), 1 - np.repeat(longer, 10), np.repeat(range(10), 10)
    )
    assert ten_times == pytest.approx(once)


def test_pairs_of_a_question_of_the_world_are_one_cluster_in_any_form() -> None:
    """Also where they come in different parts of the data, and where their file names no group."""
    rows = [
        pair(i, "a" * (1 + i % 2), "aaa", group=f"size|ball|form {i % 3}", source="world:1")
        for i in range(12)
    ]
    rows += [pair(i, "b", "bbb", group="", id=f"row {i}", source="mine.jsonl") for i in range(3)]
    statistics = KindStatistics()
    for part in (rows[:5], rows[5:]):
        table = pa.Table.from_pylist(part, schema=arrow_schema("preferences"))
        statistics.add("preferences", table, {})
    codes = (
        pa.chunked_array(statistics.clusters)
        .combine_chunks()
        .dictionary_encode()
        .indices.to_pylist()
    )
    assert codes == [0] * 12 + [1, 2, 3]
    assert statistics.length_bias().keys() == length_bias([1], [2], [0]).keys()


def test_balance_of_categories() -> None:
    assert balance({"x": 2, "y": 2}) == pytest.approx(1)
    assert balance({"x": 3, "y": 1}) == pytest.approx(
        0.8113, abs=1e-4
    )  # entropy of (3/4, 1/4) in bits
    assert balance({"x": 3}) is None


@pytest.mark.slow
def test_rows_in_another_language_are_named() -> None:
    pytest.importorskip("py3langid")
    rows = set_of(
        demonstrations=[
            row(
                "demonstrations",
                0,
                "train",
                "Could you please tell me what the weather will be like tomorrow?",
            ),
            row(
                "demonstrations",
                1,
                "train",
                "请你告诉我明天北京的天气会怎么样，我想知道要不要带伞，谢谢。" * 2,
            ),
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
    assert linear_correlation(first, np.array([0.0, 0.0, 0.0, 1.0])) == pytest.approx(
        1.5 / np.sqrt(3.75)
    )


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


def test_hash_by_hand() -> None:
    digest = hashlib.sha256(b"split|7|what?").hexdigest()
    assert unit_hash("split", 7, "what?") == int(digest[:16], 16) / 2**64


@given(st.text(max_size=30), st.integers(0, 100))
def test_split_is_a_function_of_seed_and_group(group: str, seed: int) -> None:
    config = SplitConfig()
    assert assign([group, group], seed, config) == [split_of(group, seed, config)] * 2
    position = unit_hash("split", seed, group)
    assert split_of(group, seed, config) == (
        "test" if position < 0.2 else "validation" if position < 0.3 else "train"
    )


def test_shares_are_near_what_was_asked() -> None:
    splits = assign(map(str, range(5000)), 1, SplitConfig(validation=0.1, test=0.2))
    assert abs(splits.count("test") / 5000 - 0.2) < 0.02
    assert abs(splits.count("validation") / 5000 - 0.1) < 0.02
    users = [pair_user_of(str(i), 1, SplitConfig(judge=0.2, referee=0.5)) for i in range(5000)]
    # A fifth is the judge's; the other four fifths are halved.
    shares = {PairUser.JUDGE: 0.2, PairUser.REFEREE: 0.4, PairUser.REWARD: 0.4}
    assert all(abs(users.count(user) / 5000 - share) < 0.03 for user, share in shares.items())
    in_test = [user for user, split in zip(users, splits, strict=True) if split == "test"]
    assert all(
        abs(in_test.count(user) / len(in_test) - share) < 0.06 for user, share in shares.items()
    ), "the draws are independent"


def split_tables(
    clean: Mapping[str, pa.Table], seed: int, config: SplitConfig
) -> dict[str, pa.Table]:
    """All kinds by the files that they go into."""
    return {
        name: part
        for kind, table in clean.items()
        for name, part in split_parts(kind, table, seed, config).items()
    }


def overlap_of(files: Mapping[str, pa.Table]) -> int:
    return group_overlap({name: table.column("group").chunks for name, table in files.items()})


def tables(n: int) -> dict[str, pa.Table]:
    """The same n groups in every kind, in several rows each."""
    prompt = [{"role": "user", "content": "q"}]
    about = {
        "category": "c",
        "source": "s",
        "text": "t",
        "prompt": prompt,
        "chosen": "a",
        "rejected": "b",
        "reply": "a",
    }
    rows = [about | {"id": f"{i}", "group": f"g{i % n}"} for i in range(3 * n)]
    return {kind: pa.Table.from_pylist(rows, schema=arrow_schema(kind)) for kind in ROW_TYPES}


@given(st.integers(1, 60), st.integers(0, 50), st.floats(0.05, 0.9), st.floats(0.05, 0.9))
@settings(max_examples=30)
def test_each_pair_is_seen_by_one_of_three_models(
    n: int, seed: int, judge: float, referee: float
) -> None:
    clean = tables(n)
    files = split_tables(clean, seed, SplitConfig(judge=judge, referee=referee))
    assert overlap_of(files) == 0, "no group is in two splits, nor read by two of the models"
    assert not {"pretrain/test", "preferences_referee/test", "preferences_judge/test"} & set(files)
    kept = [
        row
        for name, table in files.items()
        if name.startswith("preferences")
        for row in table["id"].to_pylist()
    ]
    assert sorted(kept) == sorted(clean["preferences"]["id"].to_pylist())


@given(st.text(max_size=30), st.integers(0, 100), st.floats(0.05, 0.9))
def test_the_judge_takes_its_pairs_before_the_others_are_divided(
    group: str, seed: int, judge: float
) -> None:
    user = pair_user_of(group, seed, SplitConfig(judge=judge))
    assert (user is PairUser.JUDGE) == (unit_hash("judge", seed, group) < judge)
    if user is not PairUser.JUDGE:
        # What the other two would have had without a judge, they keep.
        assert (user is PairUser.REFEREE) == (unit_hash("referee", seed, group) < 0.5)


def test_overlap_is_seen_when_it_is_there() -> None:
    files = split_tables(tables(50), 3, SplitConfig())
    files["prompts/test"] = files["demonstrations/train"]
    assert overlap_of(files) == len(set(files["demonstrations/train"].column("group").to_pylist()))
    files = split_tables(tables(50), 3, SplitConfig())
    files["preferences_judge/train"] = files["preferences_referee/train"]
    shared = set(files["preferences_referee/train"].column("group").to_pylist())
    assert overlap_of(files) == len(shared) > 0

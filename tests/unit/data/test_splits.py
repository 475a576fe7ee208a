"""A group is in one split everywhere, shares come out near what was asked, and three models share no pair."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.dataset import group_overlap, split_parts
from rlhf_core.data.schema import ROW_TYPES, arrow_schema
from rlhf_core.data.splits import PairUser, assign, pair_user_of, split_of, unit_hash


def test_hash_by_hand() -> None:
    digest = hashlib.sha256(b"split|7|what?").hexdigest()
    assert unit_hash("split", 7, "what?") == int(digest[:16], 16) / 2**64


@given(st.text(max_size=30), st.integers(0, 100))
def test_split_is_a_function_of_seed_and_group(group: str, seed: int) -> None:
    config = SplitConfig()
    assert assign([group, group], seed, config) == [split_of(group, seed, config)] * 2
    position = unit_hash("split", seed, group)
    assert split_of(group, seed, config) == ("test" if position < 0.2 else "validation" if position < 0.3 else "train")


def test_shares_are_near_what_was_asked() -> None:
    splits = assign(map(str, range(5000)), 1, SplitConfig(validation=0.1, test=0.2))
    assert abs(splits.count("test") / 5000 - 0.2) < 0.02
    assert abs(splits.count("validation") / 5000 - 0.1) < 0.02
    users = [pair_user_of(str(i), 1, SplitConfig(judge=0.2, referee=0.5)) for i in range(5000)]
    # A fifth is the judge's; the other four fifths are halved.
    shares = {PairUser.JUDGE: 0.2, PairUser.REFEREE: 0.4, PairUser.REWARD: 0.4}
    assert all(abs(users.count(user) / 5000 - share) < 0.03 for user, share in shares.items())
    in_test = [user for user, split in zip(users, splits, strict=True) if split == "test"]
    assert all(abs(in_test.count(user) / len(in_test) - share) < 0.06 for user, share in shares.items()), (
        "the draws are independent"
    )


def split_tables(clean: Mapping[str, pa.Table], seed: int, config: SplitConfig) -> dict[str, pa.Table]:
    """All kinds by the files that they go into."""
    return {
        name: part for kind, table in clean.items() for name, part in split_parts(kind, table, seed, config).items()
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


def test_no_group_spans_two_splits_in_any_kind() -> None:
    files = split_tables(tables(400), 3, SplitConfig())
    assert overlap_of(files) == 0
    split_by_group: dict[str, set[str]] = {}
    for name, table in files.items():
        for group in table.column("group").to_pylist():
            split_by_group.setdefault(group, set()).add(name.split("/")[1])
    assert {len(splits) for splits in split_by_group.values()} == {1}
    parts = [set(files[f"{user}/train"].column("group").to_pylist()) for user in PairUser]
    assert all(parts) and len(set().union(*parts)) == sum(map(len, parts))
    pairs = sum(table.num_rows for name, table in files.items() if name.startswith("preferences"))
    assert pairs == 1200, "every pair is in exactly one file"
    assert not {"pretrain/test", "preferences_referee/test", "preferences_judge/test"} & set(files)


@given(st.integers(1, 60), st.integers(0, 50), st.floats(0.05, 0.9), st.floats(0.05, 0.9))
@settings(max_examples=30)
def test_each_pair_is_seen_by_one_of_three_models(n: int, seed: int, judge: float, referee: float) -> None:
    clean = tables(n)
    files = split_tables(clean, seed, SplitConfig(judge=judge, referee=referee))
    assert overlap_of(files) == 0
    kept = [row for name, table in files.items() if name.startswith("preferences") for row in table["id"].to_pylist()]
    assert sorted(kept) == sorted(clean["preferences"]["id"].to_pylist())


@given(st.text(max_size=30), st.integers(0, 100), st.floats(0.05, 0.9))
def test_the_judge_takes_its_pairs_before_the_others_are_divided(group: str, seed: int, judge: float) -> None:
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

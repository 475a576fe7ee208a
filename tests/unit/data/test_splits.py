"""A group is in one split everywhere, shares come out near what was asked, and the halves are disjoint."""

from __future__ import annotations

import hashlib

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.validate import SplitConfig
from rlhf_core.data.dataset import group_overlap, split_tables
from rlhf_core.data.schema import ROW_TYPES, arrow_schema
from rlhf_core.data.splits import assign, is_referee, overlap, split_of, unit_hash


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
    referee = [is_referee(str(i), 1, SplitConfig()) for i in range(5000)]
    assert abs(sum(referee) / 5000 - 0.5) < 0.03
    in_test = [r for r, split in zip(referee, splits, strict=True) if split == "test"]
    assert abs(sum(in_test) / len(in_test) - 0.5) < 0.06, "the two draws are independent"


def test_overlap_counts_groups_in_more_than_one_set() -> None:
    assert overlap([{"a", "b"}, {"b", "c"}, {"b", "c", "d"}]) == 2
    assert overlap([{"a"}, {"b"}]) == 0


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
    assert group_overlap(files) == 0
    split_by_group: dict[str, set[str]] = {}
    for name, table in files.items():
        for group in table.column("group").to_pylist():
            split_by_group.setdefault(group, set()).add(name.split("/")[1])
    assert {len(splits) for splits in split_by_group.values()} == {1}
    halves = [
        set(files[f"{half}/train"].column("group").to_pylist()) for half in ("preferences", "preferences_referee")
    ]
    assert halves[0] and halves[1] and not halves[0] & halves[1]
    pairs = sum(table.num_rows for name, table in files.items() if name.startswith("preferences"))
    assert pairs == 1200, "every pair is in exactly one file"
    assert not {"pretrain/test", "preferences_referee/test"} & set(files)


def test_overlap_is_seen_when_it_is_there() -> None:
    files = split_tables(tables(50), 3, SplitConfig())
    files["prompts/test"] = files["demonstrations/train"]
    assert group_overlap(files) == len(set(files["demonstrations/train"].column("group").to_pylist()))

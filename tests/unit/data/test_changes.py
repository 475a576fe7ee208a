"""Changes between two states of the data: each row is unchanged, relabelled, changed, added or removed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.collection.rows import read_records
from rlhf_core.data.inspection.changes import as_json_value, as_text, compare, compare_kinds, file_state
from rlhf_core.data.readers.content import Record
from rlhf_core.data.schema import arrow_schema
from rlhf_core.errors import DataError


def table(*pairs: tuple[str, str, str], **labels: Any) -> pa.Table:
    values = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) | labels for pair in pairs]
    rows = read_records([Record(n, v) for n, v in enumerate(values, 1)], "preferences", "x", "").rows if values else []
    return pa.Table.from_pylist(rows, schema=arrow_schema("preferences"))


def test_every_row_is_counted_once() -> None:
    before = table(("stays?", "a", "b"), ("goes?", "a", "b"), ("other reply?", "a", "b"), ("swapped?", "a", "b"))
    after = table(("new?", "a", "b"), ("stays?", "a", "b"), ("other reply?", "A", "b"), ("swapped?", "b", "a"))
    changes = compare("preferences", before, after)
    assert (changes.unchanged, changes.added, changes.removed) == (1, [0], [1])
    assert (changes.changed.before, changes.changed.after, changes.swapped) == ([2, 3], [2, 3], 1)
    value = as_json_value([changes])["preferences"]
    assert (value["before"], value["after"], value["changed"], value["swapped"]) == (4, 4, 2, 1)
    assert value["examples"]["added"][0]["prompt"][0]["content"] == "new?"
    text = as_text([changes], width=80)
    assert "changed     2, 1 of them with the replies swapped" in text and "new?" in text
    assert max(map(cell_len, text.splitlines())) <= 80


def test_another_margin_or_category_is_another_label() -> None:
    before, after = (table(("q?", "a", "b"), ("r?", "a", "b"), margin=margin, category="c") for margin in (1, 2))
    changes = compare("preferences", before, after)
    assert (changes.unchanged, len(changes.relabelled), changes.added, len(changes.changed)) == (0, 2, [], 0)
    assert "margin 1.0 → 2.0" in as_text([changes])
    same = compare("preferences", before, before)
    assert same.is_empty and as_text([same]) == "preferences: 2 rows before, 2 after, all the same"


PAIRS = st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("ab"), st.sampled_from("cd")), max_size=8)


@given(PAIRS, PAIRS)
def test_counts_add_up_and_copies_count_apart(before: list[Any], after: list[Any]) -> None:
    changes = compare("preferences", table(*before), table(*after))
    assert changes.unchanged == (Counter(before) & Counter(after)).total()
    assert len(before) == changes.unchanged + len(changes.removed) + len(changes.changed)
    assert len(after) == changes.unchanged + len(changes.added) + len(changes.changed)
    assert not {before[i][0] for i in changes.removed} & {after[j][0] for j in changes.added}


def test_files_are_compared_as_the_kind_that_both_hold(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "q?", "chosen": "a", "rejected": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "q?", "reply": "c"}\n')
    options = ReadOptions()
    tables = [file_state([name], tmp_path, options, tmp_path / name[0]) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(DataError, match="the one holds preferences, the other demonstrations; name the kind"):
        compare_kinds(*tables)
    before, after = (
        file_state([name], tmp_path, options, tmp_path / name[0], "demonstrations") for name in ("a.jsonl", "b.jsonl")
    )
    (changes,) = compare_kinds(before, after)
    assert len(changes.changed) == 1 and changes.before.column("reply").to_pylist() == ["a"]

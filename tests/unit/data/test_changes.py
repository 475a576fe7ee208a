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
from rlhf_core.data.inspection.changes import as_text, compare, compare_kinds, file_state
from rlhf_core.data.readers.content import Record
from rlhf_core.data.schema import arrow_schema
from rlhf_core.errors import DataError


def table(*pairs: tuple[str, str, str], **labels: Any) -> pa.Table:
    values = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) | labels for pair in pairs]
    rows = read_records([Record(n, v) for n, v in enumerate(values, 1)], "preferences", "x", "").rows if values else []
    return pa.Table.from_pylist(rows, schema=arrow_schema("preferences"))


def prompts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def test_every_row_is_counted_once() -> None:
    before = table(("stays?", "a", "b"), ("goes?", "a", "b"), ("other reply?", "a", "b"), ("swapped?", "a", "b"))
    after = table(("new?", "a", "b"), ("stays?", "a", "b"), ("other reply?", "A", "b"), ("swapped?", "b", "a"))
    changes = compare("preferences", before, after, show=9)
    counts = {name: changes[name] for name in ("unchanged", "added", "removed", "changed", "swapped", "relabelled")}
    assert counts == {"unchanged": 1, "added": 1, "removed": 1, "changed": 2, "swapped": 1, "relabelled": 0}
    examples = changes["examples"]
    assert (prompts(examples["added"]), prompts(examples["removed"])) == (["new?"], ["goes?"])
    for when in ("before", "after"):
        assert prompts([pair[when] for pair in examples["changed"]]) == ["other reply?", "swapped?"]
    text = as_text({"preferences": changes}, width=80)
    assert "changed     2, 1 of them with the replies swapped" in text and "new?" in text
    assert max(map(cell_len, text.splitlines())) <= 80


def test_another_margin_or_category_is_another_label() -> None:
    before, after = (table(("q?", "a", "b"), ("r?", "a", "b"), margin=margin, category="c") for margin in (1, 2))
    changes = compare("preferences", before, after)
    assert (changes["unchanged"], changes["relabelled"], changes["added"], changes["changed"]) == (0, 2, 0, 0)
    assert "margin 1.0 → 2.0" in as_text({"preferences": changes})
    same = compare("preferences", before, before)
    assert as_text({"preferences": same}) == "preferences: 2 rows before, 2 after, all the same"


PAIRS = st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("ab"), st.sampled_from("cd")), max_size=8)


@pytest.mark.slow
@given(PAIRS, PAIRS)
def test_counts_add_up_and_copies_count_apart(before: list[Any], after: list[Any]) -> None:
    changes = compare("preferences", table(*before), table(*after), show=99)
    assert changes["unchanged"] == (Counter(before) & Counter(after)).total()
    assert len(before) == changes["unchanged"] + changes["removed"] + changes["changed"]
    assert len(after) == changes["unchanged"] + changes["added"] + changes["changed"]
    examples = changes["examples"]
    assert not {*prompts(examples["removed"])} & {*prompts(examples["added"])}


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
    ((kind, changes),) = compare_kinds(before, after).items()
    assert (kind, changes["changed"]) == ("demonstrations", 1)
    assert changes["examples"]["changed"][0]["before"]["reply"] == "a"

"""Counts of parts of a source add up, and no reason is lost among many."""

from __future__ import annotations

from collections import Counter

from rlhf_core.data.row_counts import MOST_REASONS, OTHER_REASONS, READABLE, ReasonCounts, RowCounts, RowFinding


def finding(reason: str, position: int = 1) -> RowFinding:
    return RowFinding(READABLE, "preferences", reason, "a.jsonl", position)


def test_parts_of_a_source_add_up_to_what_it_is_as_a_whole() -> None:
    whole = RowCounts("a.jsonl", "preferences", "standard")
    for start in (0, 10):
        part = RowCounts("a.jsonl", "preferences", "standard", records=10, kept=8, revision="abc")
        part.dropped["tie"] += 1
        part.unused["extra"] += 2
        part.refuse(finding("no text", start + 3))
        whole.take(part)
    assert (whole.records, whole.kept, whole.refused, whole.dropped["tie"]) == (20, 16, 2, 2)
    assert whole.records + whole.expanded == whole.kept + whole.refused + whole.dropped.total() + whole.cut
    (reason,) = whole.reasons.commonest()
    assert (reason.rows, reason.positions, reason.first.position) == (2, [3, 13], 3)
    whole.cut_to(10)
    assert (whole.kept, whole.cut) == (10, 6)
    read = RowCounts.of_manifest("preferences", whole.as_dict() | {"share": 1.0})
    assert (read.kept, read.refused, read.dropped, read.unused) == (10, 2, Counter(tie=2), Counter(extra=4))


def test_unread_rows_of_a_hub_set_stay_unknown_once_they_are() -> None:
    whole = RowCounts("hub:a/b", "prompts", "prompt")
    for unread in (None, 0):
        whole.take(RowCounts("hub:a/b", "prompts", "prompt", unread=unread))
    assert whole.unread is None


def test_a_file_with_a_reason_for_each_row_does_not_fill_the_memory() -> None:
    counts = ReasonCounts.of(finding(f"margin {n} is not a number", n) for n in range(3 * MOST_REASONS))
    assert len(counts) == MOST_REASONS + 1 and sum(count.rows for count in counts.values()) == 3 * MOST_REASONS
    assert counts.commonest()[0].reason == OTHER_REASONS

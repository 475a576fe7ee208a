"""What differs between two states of the data: rows added, removed and changed, by the hash of
their content.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.collection.raw_folder import StoredRows
from rlhf_core.data.collection.sources import source_chunks, source_files, sources_by_kind
from rlhf_core.data.row_counts import RowCounts
from rlhf_core.data.schema import ROW_TYPES, arrow_schema, tables_of
from rlhf_core.data.tables import mapped_table
from rlhf_core.errors import DataError
from rlhf_core.storage.files import read_json
from rlhf_extras.data_files.describe import example_lines
from rlhf_extras.data_files.report_lines import wrapped

LABELS = ("margin", "category")
CHUNK_ROWS = 4096
DIGEST_BYTES = 16
WHEN = ("before", "after")
Key = TypeVar("Key", str, bytes)


@dataclass(frozen=True)
class DataState:
    """One of two states that are compared.

    Attributes:
        tables: The rows, by kind.
        left_out: By kind, how many records were ``refused`` or ``dropped`` by the readers, so that
            they are no rows.
    """

    tables: dict[str, pa.Table] = field(default_factory=dict)
    left_out: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def leave_out(self, counts: RowCounts) -> None:
        """Count the records of a source that are no rows."""
        self.left_out[counts.kind].update(refused=counts.refused, dropped=counts.dropped.total())


def file_state(
    files: Sequence[str], base: Path, options: ReadOptions, scratch: Path, kind: str | None = None
) -> DataState:
    """Read files as a table per kind: ``kind``, or what each file serves as best.

    Rows are in the folder ``scratch``, which must stay as long as the tables are used.
    """
    sources, state = sources_by_kind(files, base, options, kind), DataState()

    def rows(of_kind: str) -> Iterator[pa.Table]:
        for file in source_files(sources.of(of_kind), base):
            for part in source_chunks(file, of_kind):
                yield from tables_of(of_kind, part.rows)
            state.leave_out(part.counts)

    for name in (name for name in ROW_TYPES if sources.of(name)):
        state.tables[name] = mapped_table(scratch / f"{name}.arrow", arrow_schema(name), rows(name))
    return state


def collected_state(raw: Path, scratch: Path, kind: str | None = None) -> DataState:
    """Read the folder ``data/raw`` that stage collect writes; ``scratch`` and ``kind`` as of
    :func:`file_state`.
    """
    kinds, state = read_json(raw / "manifest.json")["kinds"], DataState()
    for name in ROW_TYPES if kind is None else [kind]:
        parts = StoredRows.of_file(name, raw / name / "data.parquet").parts()
        state.tables[name] = mapped_table(scratch / f"{name}.arrow", arrow_schema(name), parts)
        for file in kinds[name]["files"]:
            state.leave_out(RowCounts.of_manifest(name, file))
    return state


def compare_kinds(before: DataState, after: DataState, show: int = 1) -> dict[str, dict[str, Any]]:
    """Compare the rows of every kind that one of the states has; see :func:`compare`.

    Raises:
        DataError: No kind is in both, so that the states are not comparable.
    """
    old, new = before.tables, after.tables
    if old and new and not old.keys() & new.keys():
        raise DataError(
            f"the one holds {', '.join(old)}, the other {', '.join(new)}; name the kind of both with --kind"
        )
    changes = {}
    for kind in (kind for kind in ROW_TYPES if kind in old or kind in new):
        empty = arrow_schema(kind).empty_table()
        changes[kind] = compare(kind, old.get(kind, empty), new.get(kind, empty), show)
        changes[kind]["left_out"] = {
            "before": +before.left_out[kind],
            "after": +after.left_out[kind],
        }
    return changes


def compare(kind: str, before: pa.Table, after: pa.Table, show: int = 1) -> dict[str, Any]:
    """Compare two tables of ``kind`` by the ids of their rows, which are hashes of the content;
    copies count apart.

    Returns:
        As JSON values how many rows there are ``before`` and ``after``, and how many of them are
        ``unchanged`` (the same content and labels), ``added`` (the content is new, and no removed
        row has the prompt), ``removed`` (the reverse), ``changed`` (rows of one prompt with other
        content, paired in their order), ``swapped`` (those of the changed ones whose two replies
        changed places) and ``relabelled`` (the same content with another margin or category).
        ``examples`` has the first ``show`` of each.
    """
    ids = [dict(enumerate(table.column("id").to_pylist())) for table in (before, after)]
    same, removed, added = _matched(*ids)
    labels = [
        (before.column(name).to_pylist(), after.column(name).to_pylist())
        for name in LABELS
        if name in before.column_names
    ]
    relabelled = []
    for i, j in same:
        if any(old[i] != new[j] for old, new in labels):
            relabelled.append((i, j))
    changed, removed, added = _matched(
        _digests(before, ["group"], removed), _digests(after, ["group"], added)
    )
    swapped = 0
    if kind == "preferences":
        old = _digests(before, ["chosen", "rejected"], [i for i, _ in changed])
        new = _digests(after, ["rejected", "chosen"], [j for _, j in changed])
        swapped = sum(old[i] == new[j] for i, j in changed)

    def pairs(rows: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        return [{"before": _row(before, i), "after": _row(after, j)} for i, j in rows[:show]]

    examples = {
        "added": [_row(after, j) for j in added[:show]],
        "removed": [_row(before, i) for i in removed[:show]],
        "changed": pairs(changed),
        "relabelled": pairs(relabelled),
    }
    return {
        "before": len(before),
        "after": len(after),
        "unchanged": len(same) - len(relabelled),
        "added": len(added),
        "removed": len(removed),
        "changed": len(changed),
        "swapped": swapped,
        "relabelled": len(relabelled),
        "examples": examples,
    }


def _row(table: pa.Table, number: int) -> dict[str, Any]:
    row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
    return row


def _digests(table: pa.Table, columns: Sequence[str], numbers: Sequence[int]) -> dict[int, bytes]:
    """Return by number a 128-bit hash of the texts in ``columns``, taken in that order, of each of
    some rows.
    """
    wanted = np.zeros(len(table), dtype=bool)
    wanted[list(numbers)] = True
    digests: dict[int, bytes] = {}
    first = 0
    for batch in table.select(columns).to_batches(max_chunksize=CHUNK_ROWS):
        inside = np.flatnonzero(wanted[first : first + batch.num_rows])
        rows = batch.filter(pa.array(wanted[first : first + batch.num_rows]))
        texts = zip(*(rows.column(name).to_pylist() for name in columns), strict=True)
        for row, content in zip(inside, texts, strict=True):
            parts = json.dumps(content).encode()
            digests[first + int(row)] = blake2b(parts, digest_size=DIGEST_BYTES).digest()
        first += batch.num_rows
    return digests


def _matched(
    before: Mapping[int, Key], after: Mapping[int, Key]
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Pair the rows that have the same key, in their order; return the pairs and what is left of
    either side.
    """
    waiting: defaultdict[Key, list[int]] = defaultdict(list)
    for i in reversed(list(before)):
        waiting[before[i]].append(i)
    pairs: list[tuple[int, int]] = []
    left: list[int] = []
    for j, key in after.items():
        if waiting.get(key):
            pairs.append((waiting[key].pop(), j))
        else:
            left.append(j)
    unmatched = sorted(chain.from_iterable(waiting.values()))
    return pairs, unmatched, left


def as_text(changes: Mapping[str, Mapping[str, Any]], width: int = 80) -> str:
    """Return a block of lines per kind of what :func:`compare_kinds` returns."""
    return "\n\n".join("\n".join(_lines(kind, of_kind, width)) for kind, of_kind in changes.items())


def _lines(kind: str, changes: Mapping[str, Any], width: int) -> Iterator[str]:
    title = f"{kind}: {changes['before']} rows before, {changes['after']} after"
    differs = any(changes[name] for name in ("added", "removed", "changed", "relabelled"))
    yield title if differs else f"{title}, all the same"
    if differs:
        examples = changes["examples"]
        yield f"  unchanged   {changes['unchanged']}"
        for name in ("added", "removed"):
            yield f"  {name:<10}  {changes[name]}"
            for row in examples[name]:
                yield from ("    example", *example_lines(kind, row, width))
        swapped = (
            f", {changes['swapped']} of them with the replies swapped" if changes["swapped"] else ""
        )
        yield f"  changed     {changes['changed']}{swapped}"
        for pair in examples["changed"]:
            for when in WHEN:
                yield from (f"    {when}", *example_lines(kind, pair[when], width))
        yield f"  relabelled  {changes['relabelled']}"
        for pair in examples["relabelled"]:
            old, new = (pair[when] for when in WHEN)
            labels = [
                f"{name} {old[name]} → {new[name]}"
                for name in LABELS
                if old.get(name) != new.get(name)
            ]
            yield from wrapped("    ", f"{', '.join(labels)} ({old['id']})", width)
    counts = [changes.get("left_out", {}).get(when, {}) for when in WHEN]
    for name in ("refused", "dropped"):
        old_count, new_count = (count.get(name, 0) for count in counts)
        if old_count or new_count:
            yield f"  {name:<10}  {old_count} before, {new_count} after: not compared"

"""What differs between two states of the data: rows added, removed and changed, by the hash of their content."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.collection.sources import (
    SourceFile,
    source_chunks,
    source_files,
    sources_by_kind,
)
from rlhf_core.data.inspection.report_lines import example_lines, wrapped
from rlhf_core.data.schema import ROW_TYPES, arrow_schema, tables_of
from rlhf_core.data.tables import mapped_table
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.errors import DataError
from rlhf_core.storage.files import read_json

LABELS = ("margin", "category")
CHUNK_ROWS = 4096
DIGEST_BYTES = 16
Key = TypeVar("Key", str, bytes)


@dataclass(frozen=True)
class RowPairs:
    """Numbers of rows that belong together, before and after."""

    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.before)

    def add(self, before: int, after: int) -> None:
        """Add a pair."""
        self.before.append(before)
        self.after.append(after)


@dataclass(frozen=True)
class DataState:
    """One of two states that are compared.

    Attributes:
        tables: The rows, by kind.
        left_out: By kind, how many records were ``refused`` or ``dropped`` by the readers, so that they are no rows.
    """

    tables: Mapping[str, pa.Table]
    left_out: Mapping[str, Counter[str]] = field(default_factory=dict)

    def only(self, kind: str | None) -> DataState:
        """Return the state with rows of one kind alone; None stands for all."""
        return self if kind is None else DataState({k: t for k, t in self.tables.items() if k == kind}, self.left_out)


@dataclass(frozen=True)
class Changes:
    """What happened to the rows of a kind. Rows are numbers in the tables ``before`` and ``after``.

    Attributes:
        unchanged: How many rows have the same content and labels.
        added: Rows whose content is new, and whose prompt no removed row has.
        removed: Rows whose content is gone, and whose prompt no new row has.
        changed: Rows of one prompt with other content, paired in their order.
        swapped: How many of ``changed`` are pairs whose two replies changed places.
        relabelled: Rows of the same content with another margin or category.
        left_out: Before and after, how many records are no rows; see :class:`DataState`.
    """

    kind: str
    before: pa.Table
    after: pa.Table
    unchanged: int
    added: list[int]
    removed: list[int]
    changed: RowPairs
    swapped: int
    relabelled: RowPairs
    left_out: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.removed or len(self.changed) or len(self.relabelled))


def compare(kind: str, before: pa.Table, after: pa.Table) -> Changes:
    """Compare two tables of ``kind`` by the ids of their rows, which are hashes of the content; copies count apart."""
    same, removed, added = _matched(_column(before, "id"), _column(after, "id"), range(len(before)), range(len(after)))
    labels = [(_column(before, name), _column(after, name)) for name in LABELS if name in before.column_names]
    relabelled = RowPairs()
    for i, j in zip(same.before, same.after, strict=True):
        if any(old[i] != new[j] for old, new in labels):
            relabelled.add(i, j)
    changed, removed, added = _matched(
        _digests(before, ["group"], removed), _digests(after, ["group"], added), removed, added
    )
    swapped = 0
    if kind == "preferences":
        old = _digests(before, ["chosen", "rejected"], changed.before)
        new = _digests(after, ["rejected", "chosen"], changed.after)
        swapped = sum(old[i] == new[j] for i, j in zip(changed.before, changed.after, strict=True))
    unchanged = len(same) - len(relabelled)
    return Changes(kind, before, after, unchanged, added, removed, changed, swapped, relabelled)


def _column(table: pa.Table, name: str) -> list[Any]:
    values: list[Any] = table.column(name).to_pylist()
    return values


def _digests(table: pa.Table, columns: Sequence[str], numbers: Sequence[int]) -> dict[int, bytes]:
    """Return by number a 128-bit hash of the texts in ``columns``, taken in that order, of each of some rows."""
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


def _rows(table: pa.Table, numbers: Sequence[int]) -> pa.Table:
    """Return some rows, in the order of their numbers; ``take`` would copy whole columns."""
    return pa.concat_tables([table.slice(0, 0), *(table.slice(number, 1) for number in numbers)])


def _matched(
    before: Mapping[int, Key] | Sequence[Key],
    after: Mapping[int, Key] | Sequence[Key],
    old: Sequence[int],
    new: Sequence[int],
) -> tuple[RowPairs, list[int], list[int]]:
    """Pair the rows ``old`` and ``new`` that have the same key, in their order; return the pairs and what is left."""
    waiting: defaultdict[Key, list[int]] = defaultdict(list)
    for i in reversed(old):
        waiting[before[i]].append(i)
    pairs, left = RowPairs(), []
    for j in new:
        if waiting.get(after[j]):
            pairs.add(waiting[after[j]].pop(), j)
        else:
            left.append(j)
    return pairs, sorted(i for rows in waiting.values() for i in rows), left


def file_state(
    files: Sequence[str], base: Path, options: ReadOptions, scratch: Path, kind: str | None = None
) -> DataState:
    """Read files as a table per kind: ``kind``, or what each file serves as best.

    Args:
        files: Paths, globs, URLs or hub ids.
        base: The folder that relative paths start at.
        options: How the rows are read.
        scratch: A folder for the rows, which must stay as long as the tables are used.
        kind: One of ``ROW_TYPES``.

    Raises:
        DataError: A file cannot be read, or is of no known format.
    """
    sources = sources_by_kind(files, base, options, kind)
    state = DataState({}, {name: Counter() for name in ROW_TYPES})
    tables = {}
    for name in ROW_TYPES:
        if sources.of(name):
            rows = _file_rows(source_files(sources.of(name), base), name, state.left_out[name])
            tables[name] = mapped_table(scratch / f"{name}.arrow", arrow_schema(name), rows)
    return replace(state, tables=tables)


def _file_rows(files: Sequence[SourceFile], kind: str, left_out: Counter[str]) -> Iterator[pa.Table]:
    """Yield the rows of files as tables, and count in ``left_out`` the records that are none."""
    for part in (part for file in files for part in source_chunks(file, kind)):
        left_out.update(refused=part.counts.refused, dropped=part.counts.dropped.total())
        yield from tables_of(kind, part.rows)


def collected_state(raw: Path, scratch: Path) -> DataState:
    """Read all kinds of the folder ``data/raw`` that stage collect writes; ``scratch`` as of :func:`file_state`."""
    tables = {
        kind: mapped_table(
            scratch / f"{kind}.arrow", arrow_schema(kind), StoredRows.of_file(kind, raw / kind / "data.parquet").parts()
        )
        for kind in ROW_TYPES
    }
    left_out = {kind: Counter[str]() for kind in ROW_TYPES}
    for kind, about in read_json(raw / "manifest.json")["kinds"].items():
        for file in about["files"]:
            left_out[kind].update(refused=file["refused"], dropped=sum(file["dropped"].values()))
    return DataState(tables, left_out)


def compare_kinds(before: DataState, after: DataState) -> list[Changes]:
    """Compare the rows of every kind that one of the states has.

    Raises:
        DataError: No kind is in both, so that the states are not comparable.
    """
    old, new = before.tables, after.tables
    if old and new and not old.keys() & new.keys():
        raise DataError(
            f"the one holds {', '.join(old)}, the other {', '.join(new)}; name the kind of both with --kind"
        )
    changes = []
    for kind in ROW_TYPES:
        if kind in old or kind in new:
            empty = arrow_schema(kind).empty_table()
            left_out = before.left_out.get(kind, Counter()), after.left_out.get(kind, Counter())
            compared = compare(kind, old.get(kind, empty), new.get(kind, empty))
            changes.append(replace(compared, left_out=left_out))
    return changes


def as_json_value(all_changes: Sequence[Changes], show: int = 1) -> dict[str, Any]:
    """Return the counts by kind, and ``show`` examples of each change."""
    value: dict[str, Any] = {}
    for changes in all_changes:
        value[changes.kind] = {
            "before": len(changes.before),
            "after": len(changes.after),
            "unchanged": changes.unchanged,
            "added": len(changes.added),
            "removed": len(changes.removed),
            "changed": len(changes.changed),
            "swapped": changes.swapped,
            "relabelled": len(changes.relabelled),
            "left_out": {when: +count for when, count in zip(("before", "after"), changes.left_out, strict=True)},
            "examples": {
                "added": _rows(changes.after, changes.added[:show]).to_pylist(),
                "removed": _rows(changes.before, changes.removed[:show]).to_pylist(),
                "changed": _examples(changes, changes.changed, show),
                "relabelled": _examples(changes, changes.relabelled, show),
            },
        }
    return value


def _examples(changes: Changes, pairs: RowPairs, show: int) -> list[dict[str, Any]]:
    old = _rows(changes.before, pairs.before[:show]).to_pylist()
    new = _rows(changes.after, pairs.after[:show]).to_pylist()
    return [{"before": i, "after": j} for i, j in zip(old, new, strict=True)]


def as_text(all_changes: Sequence[Changes], show: int = 1, width: int = 80) -> str:
    """Return a block of lines per kind, with ``show`` examples of each change."""
    return "\n\n".join(_block(changes, show, width) for changes in all_changes)


def _block(changes: Changes, show: int, width: int) -> str:
    title = f"{changes.kind}: {len(changes.before)} rows before, {len(changes.after)} after"
    left_out = _left_out_lines(changes)
    if changes.is_empty:
        return "\n".join([f"{title}, all the same", *left_out])
    examples = as_json_value([changes], show)[changes.kind]["examples"]
    lines = [title, f"  unchanged   {changes.unchanged}", f"  added       {len(changes.added)}"]
    for row in examples["added"]:
        lines += ["    example", *example_lines(changes.kind, row, width)]
    lines.append(f"  removed     {len(changes.removed)}")
    for row in examples["removed"]:
        lines += ["    example", *example_lines(changes.kind, row, width)]
    swapped = f", {changes.swapped} of them with the replies swapped" if changes.swapped else ""
    lines.append(f"  changed     {len(changes.changed)}{swapped}")
    for pair in examples["changed"]:
        for when in ("before", "after"):
            lines += [f"    {when}", *example_lines(changes.kind, pair[when], width)]
    lines.append(f"  relabelled  {len(changes.relabelled)}")
    for pair in examples["relabelled"]:
        labels = ", ".join(
            f"{name} {pair['before'][name]} → {pair['after'][name]}"
            for name in LABELS
            if name in pair["before"] and pair["before"][name] != pair["after"][name]
        )
        lines += wrapped("    ", f"{labels} ({pair['before']['id']})", width)
    return "\n".join([*lines, *left_out])


def _left_out_lines(changes: Changes) -> list[str]:
    """Return a line for records that are refused, and one for those that are dropped, where there are some."""
    before, after = changes.left_out
    names = [name for name in ("refused", "dropped") if before[name] or after[name]]
    return [f"  {name:<10}  {before[name]} before, {after[name]} after: not compared" for name in names]

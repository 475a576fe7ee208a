"""The folder ``data/raw`` while it is written: rows arrive in parts, and derived rows follow those they come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_core.config.data import SourceOptions
from rlhf_core.data.collection.rows import DERIVED_FROM, FileRows, derive, whole_records
from rlhf_core.data.readers.detection import unused_summary
from rlhf_core.data.row_counts import RowCounts
from rlhf_core.data.schema import ROW_TYPES, arrow_schema, content_id, tables_of
from rlhf_core.data.tables import TableWriter, table_chunks
from rlhf_core.data.validation.stored_rows import (
    PROMPT_ONLY,
    PROMPT_ONLY_SCHEMA,
    PROVENANCE_SCHEMA,
    REFUSED_SCHEMA,
    findings_table,
    provenance_table,
)


class RawFolder(ExitStack):
    """Writes ``KIND/data.parquet``, ``provenance.parquet`` and ``refused.parquet``; they are there once the block ends.

    ``prompt_only.parquet`` is written too where prompts come from records that give no other row.

    Attributes:
        rows: Rows of each kind.
        cut: Rows of each kind that were left out because of ``limit``.
    """

    def __init__(self, folder: Path, derived: Mapping[str, str], limit: int | None) -> None:
        """Begin with empty tables, of at most ``limit`` rows each.

        ``derived`` says by kind what it is derived from; empty for kinds whose rows are only appended. Of a kind that
        is both, rows have to be appended before what they may be derived from.
        """
        super().__init__()
        self.folder, self.limit = folder, limit
        self.rows, self.cut = dict.fromkeys(ROW_TYPES, 0), dict.fromkeys(ROW_TYPES, 0)
        self._is_derived = {kind: bool(derived[kind]) for kind in ROW_TYPES}
        # What also comes from other children is derived first, so that its rows keep the labels of their first parent.
        self._children = {
            kind: [child for child, parents in reversed(DERIVED_FROM.items()) if kind in parents and derived[child]]
            for kind in ROW_TYPES
        }
        self._seen: dict[str, set[str]] = {kind: set() for kind in ROW_TYPES}
        self._tables: dict[str, TableWriter] = {}

    def _table(self, path: str, schema: pa.Schema) -> TableWriter:
        if path not in self._tables:
            self._tables[path] = self.enter_context(TableWriter(self.folder / path, schema))
        return self._tables[path]

    def __enter__(self) -> RawFolder:
        for kind in ROW_TYPES:
            self._table(f"{kind}/data.parquet", arrow_schema(kind))
            self._table(f"{kind}/provenance.parquet", PROVENANCE_SCHEMA)
        self.refused = self._table("refused.parquet", REFUSED_SCHEMA)
        return self

    def __exit__(self, *details: Any) -> bool | None:
        is_handled = super().__exit__(*details)
        if details[1] is None:
            with TableWriter(self.folder / "provenance.parquet", PROVENANCE_SCHEMA) as provenance:
                for path in (self.folder / kind / "provenance.parquet" for kind in ROW_TYPES):
                    for table in table_chunks(path):
                        provenance.write(table)
                    path.unlink()
        return is_handled

    def append(self, kind: str, rows: Sequence[dict[str, Any]], into: Collection[str] | None = None) -> None:
        """Append rows with their ``path`` and ``position``, and what derives from them. Records are not torn apart.

        Args:
            into: The kinds that these rows may be derived into; None for all that are derived.
        """
        if self._is_derived[kind]:
            self._seen[kind].update(row["id"] for row in rows)
        kept = rows if self.limit is None else rows[: max(self.limit - self.rows[kind], 0)]
        for table in tables_of(kind, kept):
            self._tables[f"{kind}/data.parquet"].write(table)
        self._tables[f"{kind}/provenance.parquet"].write(provenance_table(kind, kept))
        self.rows[kind] += len(kept)
        self.cut[kind] += len(rows) - len(kept)
        for child in self._children[kind]:
            if into is None or child in into:
                self.append(child, derive(child, rows, self._seen[child]), into)

    def append_prompts(self, rows: Sequence[dict[str, Any]], into: Collection[str] | None = None) -> None:
        """Append prompts of records that give no other row, with their ids; nothing where prompts are not derived."""
        if rows and self._is_derived["prompts"] and (into is None or "prompts" in into):
            ids = [content_id("prompts", row) for row in rows]
            self._table(PROMPT_ONLY, PROMPT_ONLY_SCHEMA).write(pa.table({"id": ids}, schema=PROMPT_ONLY_SCHEMA))
            self.append("prompts", derive("prompts", rows, self._seen["prompts"]))


def fair_shares(sizes: Sequence[int], limit: int | None, weights: Sequence[float] | None = None) -> list[int]:
    """Return how many of ``limit`` each source gives: in proportion to its weight, or all it has where that is less.

    Args:
        sizes: How many rows each source has.
        limit: How many are wanted in all; None means all of them.
        weights: By source; by default all sources weigh the same.
    """
    if limit is None:
        return list(sizes)
    weights = weights or [1.0] * len(sizes)
    shares: dict[int, int] = {}
    left = min(limit, sum(sizes))
    while waiting := [i for i in range(len(sizes)) if i not in shares]:
        total = sum(weights[i] for i in waiting)
        quotas = {i: round(left * weights[i] / total, 9) for i in waiting}
        decided = {i: sizes[i] for i in waiting if quotas[i] >= sizes[i]}
        if not decided:
            # The largest remainders are rounded up; of equal ones the first.
            rounded_up = sorted(waiting, key=lambda i: int(quotas[i]) - quotas[i])
            rounded_up = rounded_up[: left - sum(map(int, quotas.values()))]
            decided = {i: int(quotas[i]) + (i in rounded_up) for i in waiting}
        shares |= decided
        left -= sum(decided.values())
    return [shares[i] for i in range(len(sizes))]


@dataclass
class CountedSource:
    """A source, what became of its rows, and how they are taken."""

    counts: RowCounts
    options: SourceOptions = field(default_factory=SourceOptions)

    def take(self, part: FileRows) -> list[dict[str, Any]]:
        """Count a part of the source; return its rows within the cap, with their ``path`` and ``position``."""
        cap, before = self.options.cap, self.counts.kept
        self.counts.take(part.counts)
        if cap is not None:
            self.counts.cut_to(cap)
        kept = self.counts.kept - before
        return [
            row | {"path": part.counts.source, "position": position}
            for row, position in zip(part.rows[:kept], part.positions[:kept], strict=True)
        ]

    def prompts_within_cap(self, part: FileRows, taken: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the prompts that are all a record gives, up to the record that fills the cap: the last one taken."""
        prompts = [row | {"path": part.counts.source} for row in part.prompt_only]
        if self.options.cap is None or self.counts.kept < self.options.cap:
            return prompts
        last = taken[-1]["position"] if taken else 0
        return [row for row in prompts if row["position"] < last]

    def about(self, rows: int, licence: str | None) -> dict[str, Any]:
        """Return what the manifest says of the source: its share of the ``rows`` of its kind, and its licence."""
        share = self.counts.kept / rows if rows else 0.0
        options = {name: getattr(self.options, name) for name in ("weight", "cap", "category", "derive")}
        about = self.counts.as_dict() | unused_summary(self.counts.unused) | options
        about |= {"share": share, "licence": self.options.licence or licence}
        unset = [name for name in ("licence", "category", "derive") if about[name] is None]
        return {name: value for name, value in about.items() if name not in unset}


def write_sources(
    raw: RawFolder, kind: str, sources: Iterable[tuple[Iterable[FileRows], SourceOptions]]
) -> list[CountedSource]:
    """Write the rows of the sources of a kind, which come in parts, up to their caps; return the counts of each.

    With a limit, rows wait in a file for each source until all are read: the share of each depends on the sizes of all.
    """
    written: list[CountedSource] = []
    spools: list[tuple[_Spool, _Spool]] = []
    Append = Callable[[Sequence[dict[str, Any]]], None]
    for number, (parts, options) in enumerate(sources):
        with ExitStack() as stack:
            append: Append = partial(raw.append, kind, into=options.derive)
            append_prompts: Append = partial(raw.append_prompts, into=options.derive)
            if raw.limit is not None:
                path = raw.folder / kind / f"source-{number}"
                spools.append(
                    (
                        _Spool(path.with_suffix(".rows"), kind, raw.limit, stack),
                        _Spool(path.with_suffix(".prompts"), "prompts", raw.limit, stack),
                    )
                )
                append, append_prompts = (spool.append for spool in spools[-1])
            for first, part in enumerate(parts):
                if not first:
                    written.append(CountedSource(part.counts.empty(), options))
                rows = written[-1].take(part)
                append(rows)
                append_prompts(written[-1].prompts_within_cap(part, rows))
                raw.refused.write(findings_table(part.refused, REFUSED_SCHEMA))
    sizes = [source.counts.kept for source in written]
    shares = fair_shares(sizes, raw.limit, [source.options.weight for source in written])
    for source, share, (spool, _) in zip(written, shares, spools, strict=False):
        for rows in spool.taken(share):
            raw.append(kind, rows, source.options.derive)
        source.counts.cut_to(share)
    for source, (_, prompts) in zip(written, spools, strict=False):
        for rows in prompts.taken(prompts.limit):
            raw.append_prompts(rows, source.options.derive)
    return written


class _Spool:
    """The first ``limit`` rows of a source in a file of their own, until it is known how many of them are taken."""

    def __init__(self, path: Path, kind: str, limit: int, stack: ExitStack) -> None:
        self.path, self.kind, self.limit = path, kind, limit
        self._left = limit
        schema = arrow_schema(kind).append(pa.field("path", pa.string())).append(pa.field("position", pa.int64()))
        self._table = stack.enter_context(TableWriter(path, schema))

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows with their ``path`` and ``position``, as far as they are within the limit."""
        kept = rows[: self._left]
        for table in tables_of(self.kind, kept, self._table.schema):
            self._table.write(table)
        self._left -= len(kept)

    def taken(self, count: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the first rows in parts, all of one record in one part, and remove the file."""
        yield from whole_records(self._first(count))
        self.path.unlink()

    def _first(self, left: int) -> Iterator[list[dict[str, Any]]]:
        for table in table_chunks(self.path) if left else ():
            yield table.slice(0, left).to_pylist()
            left -= min(left, table.num_rows)
            if not left:
                return

"""The folder ``data/raw`` while it is written: rows arrive in parts, and derived rows follow those they come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from rlhf_core.config.data import SourceOptions
from rlhf_core.data.collection.rows import DERIVED_FROM, FileRows, derive, whole_records
from rlhf_core.data.readers.columns import unused_summary
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

SPOOLED = (("path", pa.string()), ("position", pa.int64()))


class RawFolder:
    """Writes ``KIND/data.parquet`` and ``provenance.parquet``; they are there once the block ends.

    ``prompt_only.parquet`` is written too where prompts come from records that give no other row.

    Attributes:
        rows: Rows of each kind.
        cut: Rows of each kind that were left out because of ``limit``.
    """

    def __init__(self, folder: Path, derived: Mapping[str, str], limit: int | None) -> None:
        """Begin with empty tables.

        Args:
            derived: By kind, what it is derived from; empty for kinds whose rows are only appended. Of a kind that is
                both, rows have to be appended before what they may be derived from.
            limit: Most rows of a kind.
        """
        self.folder, self.limit = folder, limit
        self.rows, self.cut = dict.fromkeys(ROW_TYPES, 0), dict.fromkeys(ROW_TYPES, 0)
        self._is_derived = {kind: bool(derived[kind]) for kind in ROW_TYPES}
        self._prompt_only: TableWriter | None = None
        # What also comes from other children is derived first, so that its rows keep the labels of their first parent.
        self._children = {
            kind: [child for child, parents in reversed(DERIVED_FROM.items()) if kind in parents and derived[child]]
            for kind in ROW_TYPES
        }
        self._seen: dict[str, set[str]] = {kind: set() for kind in ROW_TYPES}
        self._stack = ExitStack()

    def __enter__(self) -> RawFolder:
        enter = self._stack.enter_context
        self._tables = {
            kind: enter(TableWriter(self.folder / kind / "data.parquet", arrow_schema(kind))) for kind in ROW_TYPES
        }
        self._origins = {kind: enter(TableWriter(self._origin_path(kind), PROVENANCE_SCHEMA)) for kind in ROW_TYPES}
        return self

    def append(self, kind: str, rows: Sequence[dict[str, Any]], into: Collection[str] | None = None) -> None:
        """Append rows with their ``path`` and ``position``, and what derives from them. Records are not torn apart.

        Args:
            into: The kinds that these rows may be derived into; None for all that are derived.
        """
        if self._is_derived[kind]:
            self._seen[kind].update(row["id"] for row in rows)
        kept = rows if self.limit is None else rows[: max(self.limit - self.rows[kind], 0)]
        for table in tables_of(kind, kept):
            self._tables[kind].write(table)
        self._origins[kind].write(provenance_table(kind, kept))
        self.rows[kind] += len(kept)
        self.cut[kind] += len(rows) - len(kept)
        for child in self._children[kind]:
            if into is None or child in into:
                self.append(child, derive(child, rows, self._seen[child]), into)

    def append_prompts(self, rows: Sequence[dict[str, Any]], into: Collection[str] | None = None) -> None:
        """Append prompts of records that give no other row, with their ids; nothing where prompts are not derived."""
        if not rows or not self._is_derived["prompts"] or not (into is None or "prompts" in into):
            return
        if self._prompt_only is None:
            self._prompt_only = self._stack.enter_context(TableWriter(self.folder / PROMPT_ONLY, PROMPT_ONLY_SCHEMA))
        ids = [content_id("prompts", row) for row in rows]
        self._prompt_only.write(pa.table({"id": ids}, schema=PROMPT_ONLY_SCHEMA))
        self.append("prompts", derive("prompts", rows, self._seen["prompts"]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        if error is not None:
            return
        with TableWriter(self.folder / "provenance.parquet", PROVENANCE_SCHEMA) as provenance:
            for name in ROW_TYPES:
                for table in table_chunks(self._origin_path(name)):
                    provenance.write(table)
                self._origin_path(name).unlink()

    def _origin_path(self, kind: str) -> Path:
        return self.folder / kind / "provenance.parquet"


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
    shares = [0] * len(sizes)
    open_sources = list(range(len(sizes)))
    left = min(limit, sum(sizes))
    while open_sources:
        total = sum(weights[i] for i in open_sources)
        quotas = {i: round(left * weights[i] / total, 9) for i in open_sources}
        exhausted = [i for i in open_sources if quotas[i] >= sizes[i]]
        if not exhausted:
            # The largest remainders are rounded up; of equal ones the first.
            rounded_up = sorted(open_sources, key=lambda i: int(quotas[i]) - quotas[i])
            rounded_up = rounded_up[: left - sum(map(int, quotas.values()))]
            for i in open_sources:
                shares[i] = int(quotas[i]) + (i in rounded_up)
            break
        for i in exhausted:
            shares[i] = sizes[i]
            left -= sizes[i]
        open_sources = [i for i in open_sources if i not in exhausted]
    return shares


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
        """Return the prompts that are all a record gives, up to the record that fills the cap, with their ``path``.

        Args:
            part: A part of the source.
            taken: What :meth:`take` returned of it.
        """
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


class SourceWriter:
    """Writes the rows of the sources of a kind, up to their caps.

    With a limit, rows wait in a file for each source until all are read: the share of each depends on the sizes of all.
    """

    def __init__(self, kind: str, raw: RawFolder, refused: TableWriter) -> None:
        self.kind, self.raw, self.refused = kind, raw, refused
        self.sources: list[CountedSource] = []
        self._spools: list[Spool] = []
        self._prompt_spools: list[Spool] = []

    def add(self, parts: Iterable[FileRows], options: SourceOptions) -> None:
        """Write the rows of one source, which come in parts."""
        source: CountedSource | None = None
        with ExitStack() as stack:
            append: Callable[[Sequence[dict[str, Any]]], None]
            append = partial(self.raw.append, self.kind, into=options.derive)
            append_prompts: Callable[[Sequence[dict[str, Any]]], None]
            append_prompts = partial(self.raw.append_prompts, into=options.derive)
            if self.raw.limit is not None:
                folder, number = self.raw.folder / self.kind, len(self._spools)
                spool = stack.enter_context(Spool(folder / f"source-{number}.parquet", self.kind, self.raw.limit))
                prompts = stack.enter_context(Spool(folder / f"prompts-{number}.parquet", "prompts", self.raw.limit))
                self._spools.append(spool)
                self._prompt_spools.append(prompts)
                append, append_prompts = spool.append, prompts.append
            for part in parts:
                if source is None:
                    source = CountedSource(part.counts.empty(), options)
                    self.sources.append(source)
                rows = source.take(part)
                append(rows)
                append_prompts(source.prompts_within_cap(part, rows))
                self.refused.write(findings_table(part.refused, REFUSED_SCHEMA))

    def finish(self) -> list[CountedSource]:
        """Write each source's share of the limit, where there is one, and return the counts of all sources."""
        sizes = [source.counts.kept for source in self.sources]
        weights = [source.options.weight for source in self.sources]
        shares = fair_shares(sizes, self.raw.limit, weights)
        for source, share, spool in zip(self.sources, shares, self._spools, strict=False):
            for rows in spool.first(share):
                self.raw.append(self.kind, rows, source.options.derive)
            source.counts.cut_to(share)
            spool.path.unlink()
        for source, spool in zip(self.sources, self._prompt_spools, strict=False):
            for rows in spool.first(spool.rows):
                self.raw.append_prompts(rows, source.options.derive)
            spool.path.unlink()
        return self.sources


class Spool:
    """The first ``limit`` rows of a source in a file of their own, until it is known how many of them are taken."""

    def __init__(self, path: Path, kind: str, limit: int) -> None:
        self.path, self.kind, self.limit = path, kind, limit
        self.rows = 0
        self._schema = arrow_schema(kind)
        for name, kind_of_column in SPOOLED:
            self._schema = self._schema.append(pa.field(name, kind_of_column))

    def __enter__(self) -> Spool:
        self._table = TableWriter(self.path, self._schema).__enter__()
        return self

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows with their ``path`` and ``position``, as far as they are within the limit."""
        kept = rows[: max(self.limit - self.rows, 0)]
        for table in tables_of(self.kind, kept, self._schema):
            self._table.write(table)
        self.rows += len(kept)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._table.__exit__(kind, error, traceback)

    def first(self, count: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the first rows in parts; all of one record that are among them are in one part."""
        return whole_records(self._first(count))

    def _first(self, left: int) -> Iterator[list[dict[str, Any]]]:
        for table in table_chunks(self.path) if left else ():
            yield table.slice(0, left).to_pylist()
            left -= min(left, table.num_rows)
            if not left:
                return

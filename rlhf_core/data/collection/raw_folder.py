"""The folder ``data/raw``: rows, where each came from and what readers refused, written and read in
parts.

While it is written, derived rows follow those they come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlhf_core.config.data import SourceOptions
from rlhf_core.data.collection.rows import DERIVED_FROM, FileRows, derive, whole_records
from rlhf_core.data.readers.detection import unused_summary
from rlhf_core.data.row_counts import (
    READABLE,
    REFUSED_SCHEMA,
    TEXT,
    RowCounts,
    RowFinding,
    findings_table,
)
from rlhf_core.data.schema import ROW_TYPES, arrow_schema, content_id, tables_of
from rlhf_core.data.tables import TableWriter, parquet_footer, table_chunks
from rlhf_core.errors import DataError
from rlhf_core.storage.files import read_json

PROVENANCE_SCHEMA = pa.schema({"kind": TEXT, "id": TEXT, "source": TEXT, "position": pa.int64()})
# Ids of derived prompts whose records give no other row: nothing that they come from can fail
# validation.
PROMPT_ONLY = "prompt_only.parquet"
PROMPT_ONLY_SCHEMA = pa.schema({"id": TEXT})


class RawFolder(ExitStack):
    """Writes ``KIND/data.parquet``, ``provenance.parquet`` and ``refused.parquet``; they are there
    once the block ends.

    ``prompt_only.parquet`` is written too where prompts come from records that give no other row.

    Attributes:
        rows: Rows of each kind.
        cut: Rows of each kind that were left out because of ``limit``.
    """

    def __init__(self, folder: Path, derived: Mapping[str, str], limit: int | None) -> None:
        """Begin with empty tables, of at most ``limit`` rows each.

        ``derived`` says by kind what it is derived from; empty for kinds whose rows are only
        appended. Of a kind that is both, rows have to be appended before what they may be derived
        from.
        """
        super().__init__()
        self.folder, self.limit = folder, limit
        self.rows, self.cut = dict.fromkeys(ROW_TYPES, 0), dict.fromkeys(ROW_TYPES, 0)
        self._is_derived = {kind: bool(derived[kind]) for kind in ROW_TYPES}
        # What also comes from other children is derived first, so that its rows keep the labels of
        # their first parent.
        self._children: dict[str, list[str]] = {kind: [] for kind in ROW_TYPES}
        for child, parents in reversed(DERIVED_FROM.items()):
            if derived[child]:
                for kind in parents:
                    self._children[kind].append(child)
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

    def append(
        self, kind: str, rows: Sequence[dict[str, Any]], into: Collection[str] | None = None
    ) -> None:
        """Append rows with their ``path`` and ``position``, and what derives from them. Records are
        not torn apart.

        Args:
            into: The kinds that these rows may be derived into; None for all that are derived.
        """
        if self._is_derived[kind]:
            self._seen[kind].update(row["id"] for row in rows)
        kept = rows if self.limit is None else rows[: max(self.limit - self.rows[kind], 0)]
        for table in tables_of(kind, kept):
            self._tables[f"{kind}/data.parquet"].write(table)
        self._tables[f"{kind}/provenance.parquet"].write(_provenance_table(kind, kept))
        self.rows[kind] += len(kept)
        self.cut[kind] += len(rows) - len(kept)
        for child in self._children[kind]:
            if into is None or child in into:
                self.append(child, derive(child, rows, self._seen[child]), into)

    def append_prompts(
        self, rows: Sequence[dict[str, Any]], into: Collection[str] | None = None
    ) -> None:
        """Append prompts of records that give no other row, with their ids; nothing where prompts
        are not derived.
        """
        if rows and self._is_derived["prompts"] and (into is None or "prompts" in into):
            ids = [content_id("prompts", row) for row in rows]
            self._table(PROMPT_ONLY, PROMPT_ONLY_SCHEMA).write(
                pa.table({"id": ids}, schema=PROMPT_ONLY_SCHEMA)
            )
            self.append("prompts", derive("prompts", rows, self._seen["prompts"]))


def fair_shares(
    sizes: Sequence[int], limit: int | None, weights: Sequence[float] | None = None
) -> list[int]:
    """Return how many of ``limit`` each source gives: in proportion to its weight, or all it has
    where that is less.

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
        """Count a part of the source; return its rows within the cap, with their ``path`` and
        ``position``.
        """
        cap, before = self.options.cap, self.counts.kept
        self.counts.take(part.counts)
        if cap is not None:
            self.counts.cut_to(cap)
        kept = self.counts.kept - before
        return [
            row | {"path": part.counts.source, "position": position}
            for row, position in zip(part.rows[:kept], part.positions[:kept], strict=True)
        ]

    def prompts_within_cap(
        self, part: FileRows, taken: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the prompts that are all a record gives, up to the record that fills the cap: the
        last one taken.
        """
        prompts = [row | {"path": part.counts.source} for row in part.prompt_only]
        if self.options.cap is None or self.counts.kept < self.options.cap:
            return prompts
        last = taken[-1]["position"] if taken else 0
        return [row for row in prompts if row["position"] < last]

    def about(self, rows: int, licence: str | None) -> dict[str, Any]:
        """Return what the manifest says of the source: its share of the ``rows`` of its kind, and
        its licence.
        """
        share = self.counts.kept / rows if rows else 0.0
        options = {
            name: getattr(self.options, name) for name in ("weight", "cap", "category", "derive")
        }
        about = self.counts.as_dict() | unused_summary(self.counts.unused) | options
        about |= {"share": share, "licence": self.options.licence or licence}
        unset = [name for name in ("licence", "category", "derive") if about[name] is None]
        return {name: value for name, value in about.items() if name not in unset}


def write_sources(
    raw: RawFolder, kind: str, sources: Iterable[tuple[Iterable[FileRows], SourceOptions]]
) -> list[CountedSource]:
    """Write the rows of the sources of a kind, which come in parts, up to their caps; return the
    counts of each.

    With a limit, rows wait in a file for each source until all are read: the share of each depends
    on the sizes of all.
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
    """The first ``limit`` rows of a source in a file of their own, until it is known how many of
    them are taken.
    """

    def __init__(self, path: Path, kind: str, limit: int, stack: ExitStack) -> None:
        self.path, self.kind, self.limit = path, kind, limit
        self._left = limit
        schema = (
            arrow_schema(kind)
            .append(pa.field("path", pa.string()))
            .append(pa.field("position", pa.int64()))
        )
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


@dataclass(frozen=True)
class Origins:
    """The records that the rows of a kind were read from, in their order.

    Attributes:
        sources: The files, as params.yaml spells them.
        source: By row, the number of its file (N,).
        position: By row, the line or number of its record there (N,).
    """

    sources: Sequence[str]
    source: npt.NDArray[np.int32]
    position: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The ``source`` and ``position`` of a row."""
        return {"source": self.sources[self.source[row]], "position": int(self.position[row])}


@dataclass(frozen=True)
class StoredRows:
    """Rows of a kind.

    Attributes:
        stored: How many rows the file has.
        kept: By row of the file, whether it is one of these (N,); None for all.
        origins: Of all rows of the file; None where they are from no file of a user.
    """

    kind: str
    path: Path
    stored: int
    kept: npt.NDArray[np.bool_] | None = None
    origins: Origins | None = None

    @classmethod
    def of_file(cls, kind: str, path: Path) -> StoredRows:
        """All rows of a file; ``DataError`` when it is missing or has other columns than those of
        ``kind``.
        """
        stored_schema, rows = parquet_footer(path)
        missing = [name for name in arrow_schema(kind).names if name not in stored_schema.names]
        if missing:
            raise DataError(f"{path} lacks the column {', '.join(missing)}; collect the data again")
        stored = cls(kind, path, rows)
        stored._as_schema(stored_schema.empty_table(), arrow_schema(kind).names)
        return stored

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        return self.stored if self.kept is None else int(self.kept.sum())

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Their numbers in the file."""
        return np.arange(self.stored) if self.kept is None else np.flatnonzero(self.kept)

    def origin(self, number: int) -> dict[str, Any]:
        """The ``source`` and ``position`` that the row of this number in the file was read from;
        empty for none.
        """
        return {} if self.origins is None else self.origins[number]

    def where(self, keep: npt.NDArray[np.bool_]) -> StoredRows:
        """Those of the rows for which ``keep`` (one value for each) holds."""
        kept = np.zeros(self.stored, dtype=bool)
        kept[self.numbers[keep]] = True
        return replace(self, kept=kept)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows in order, some thousand at a time, with all columns of the kind or some of
        them.

        Raises:
            DataError: The file is damaged, or a value is not of its column's type.
        """
        names = list(columns or arrow_schema(self.kind).names)
        start = 0
        for table in table_chunks(self.path, names):
            end = start + table.num_rows
            part = table if self.kept is None else table.filter(pa.array(self.kept[start:end]))
            start = end
            if part.num_rows:
                yield self._as_schema(part, names)

    def _as_schema(self, table: pa.Table, names: Sequence[str]) -> pa.Table:
        schema = pa.schema([arrow_schema(self.kind).field(name) for name in names])
        try:
            return table.select(names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise DataError(
                f"{self.path} has columns of other types than the schema's: {error}"
            ) from error


@dataclass(frozen=True)
class RawData:
    """What the collect stage wrote.

    Attributes:
        refused: The file of rows that readers refused.
        of_files: Of kinds that are also derived, how many of the first rows are files' own.
        cut: How many rows of a kind ``collect.limit`` left out.
        prompt_only: Ids of derived prompts that come from records which give no other row.
    """

    rows: Mapping[str, StoredRows]
    refused: Path
    derived: Collection[str] = ()
    of_files: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)
    prompt_only: Collection[str] = ()


def read_raw(raw: Path) -> RawData:
    """Open the folder ``data/raw``; ``DataError`` when a file is missing or has other columns or
    another length.
    """
    rows = {kind: StoredRows.of_file(kind, raw / kind / "data.parquet") for kind in ROW_TYPES}
    origins = _read_provenance(raw / "provenance.parquet")
    for kind, listed in origins.items():
        if len(listed) != rows[kind].num_rows:
            raise DataError(
                f"{raw}/provenance.parquet does not fit the rows of {kind}; collect the data again"
            )
        rows[kind] = replace(rows[kind], origins=listed)
    manifest = raw / "manifest.json"
    kinds = read_json(manifest)["kinds"] if manifest.is_file() else {}
    derived, of_files, cut = [], {}, {}
    for kind, about in kinds.items():
        if about["derived_from"]:
            derived.append(kind)
        if "derived_rows" in about:
            of_files[kind] = about["rows"] - about["derived_rows"]
        if about.get("cut"):
            cut[kind] = about["cut"]
    prompt_only: set[str] = set()
    for table in _chunks_of(raw / PROMPT_ONLY):
        prompt_only.update(table.column("id").to_pylist())
    return RawData(rows, raw / "refused.parquet", derived, of_files, cut, prompt_only)


def _chunks_of(path: Path, columns: list[str] | None = None) -> Iterable[pa.Table]:
    """Return the rows of a file in parts; none where there is no such file."""
    return table_chunks(path, columns) if path.exists() else ()


def _provenance_table(kind: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the ``path`` and ``position`` of rows of a kind as they are stored."""
    listed = [
        {"kind": kind, "id": row["id"], "source": row["path"], "position": row["position"]}
        for row in rows
    ]
    return pa.Table.from_pylist(listed, schema=PROVENANCE_SCHEMA)


def _read_provenance(path: Path) -> dict[str, Origins]:
    """Return the origins of the rows of each kind; none where the rows are from no file."""
    numbers: dict[str, int] = {}
    sources: dict[str, list[npt.NDArray[np.int32]]] = {}
    positions: dict[str, list[npt.NDArray[np.int64]]] = {}
    for chunk in _chunks_of(path, ["kind", "source", "position"]):
        kinds = chunk.column("kind").to_numpy()
        names = chunk.column("source").to_pylist()
        source = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int32)
        position = chunk.column("position").to_numpy()
        for kind in dict.fromkeys(kinds):
            sources.setdefault(kind, []).append(source[kinds == kind])
            positions.setdefault(kind, []).append(position[kinds == kind])
    origins = {}
    for kind, of_kind in sources.items():
        origins[kind] = Origins(
            list(numbers), np.concatenate(of_kind), np.concatenate(positions[kind])
        )
    return origins


def read_refused(path: Path) -> Iterator[list[RowFinding]]:
    """Yield the rows that readers refused in parts; a missing file means that there are none."""
    for table in _chunks_of(path):
        findings = []
        for row in table.select(REFUSED_SCHEMA.names).to_pylist():
            findings.append(RowFinding(READABLE, **row, id=f"{row['source']}:{row['position']}"))
        yield findings


def count_refused(path: Path) -> Counter[str]:
    """Return how many rows of each kind readers refused."""
    counts: Counter[str] = Counter()
    for table in _chunks_of(path, ["kind"]):
        counts.update(table.column("kind").to_pylist())
    return counts

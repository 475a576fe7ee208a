"""The folder ``data/raw``: rows, their origins, and refusals, written and read in parts.

While it is written, derived rows follow those they come from.
"""

from __future__ import annotations

import sys
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
import pyarrow.compute as pc
import pyarrow.parquet as pq

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
from rlhf_core.data.tables import TableWriter, parquet_footer, readable, table_chunks
from rlhf_core.errors import DataError, first_line
from rlhf_core.storage.files import read_json

PROVENANCE_SCHEMA = pa.schema({"kind": TEXT, "id": TEXT, "source": TEXT, "position": pa.int64()})
# Ids of derived prompts whose records give no other row, so that nothing they come from can fail
# validation.
PROMPT_ONLY = "prompt_only.parquet"
PROMPT_ONLY_SCHEMA = pa.schema({"id": TEXT})


class RawFolder(ExitStack):
    """Writes the tables of ``data/raw``, which are there once the block ends.

    These are ``KIND/data.parquet``, ``provenance.parquet`` and ``refused.parquet``, and
    ``prompt_only.parquet`` if prompts come from records that give no other row.

    Attributes:
        rows: How many rows of each kind there are.
        cut: How many rows of each kind were left out because of ``limit``.
    """

    def __init__(self, folder: Path, derived: Mapping[str, str], limit: int | None) -> None:
        """Begin with empty tables.

        Args:
            derived: By kind, what it is derived from; empty for kinds whose rows are only appended.
                If a kind is both, append its rows before those that it may be derived from.
            limit: The most rows of each kind.
        """
        super().__init__()
        self.folder = folder
        self.limit = limit
        self.rows = dict.fromkeys(ROW_TYPES, 0)
        self.cut = dict.fromkeys(ROW_TYPES, 0)
        self._derived = derived
        # A kind that also comes from other children is derived first, so that its rows keep the
        # labels of their first parent.
        self._children: dict[str, list[str]] = {kind: [] for kind in ROW_TYPES}
        for child, parents in reversed(DERIVED_FROM.items()):
            if derived[child]:
                for kind in parents:
                    self._children[kind].append(child)
        self._seen: dict[str, set[str]] = {kind: set() for kind in ROW_TYPES}
        self._tables: dict[str, TableWriter] = {}

    def _table(self, path: str, schema: pa.Schema) -> TableWriter:
        if path not in self._tables:
            writer = TableWriter(self.folder / path, schema)
            self._tables[path] = self.enter_context(writer)
        return self._tables[path]

    def __enter__(self) -> RawFolder:
        try:
            for kind in ROW_TYPES:
                self._table(f"{kind}/data.parquet", arrow_schema(kind))
            self.provenance = self._table("provenance.parquet", PROVENANCE_SCHEMA)
            self.refused = self._table("refused.parquet", REFUSED_SCHEMA)
        except BaseException:
            super().__exit__(*sys.exc_info())  # open tables would keep the folder from its removal
            raise
        return self

    def append(
        self, kind: str, rows: Sequence[dict[str, Any]], into: Collection[str] | None = None
    ) -> None:
        """Append rows with their ``path`` and ``position``, and the rows that derive from them.

        All rows of a record are appended together.

        Args:
            into: The kinds that these rows may be derived into; None for all that are derived.
        """
        if self._derived[kind]:
            self._seen[kind].update(row["id"] for row in rows)
        kept = rows
        if self.limit is not None:
            room = max(self.limit - self.rows[kind], 0)
            kept = rows[:room]
        for table in tables_of(kind, kept):
            self._tables[f"{kind}/data.parquet"].write(table)
        origins = []
        for row in kept:
            origin = {"id": row["id"], "source": row["path"], "position": row["position"]}
            origins.append({"kind": kind, **origin})
        self.provenance.write(pa.Table.from_pylist(origins, schema=PROVENANCE_SCHEMA))
        self.rows[kind] += len(kept)
        self.cut[kind] += len(rows) - len(kept)
        for child in self._children[kind]:
            if into is None or child in into:
                derived = derive(child, rows, self._seen[child])
                self.append(child, derived, into)

    def append_prompts(
        self, rows: Sequence[dict[str, Any]], into: Collection[str] | None = None
    ) -> None:
        """Append prompts of records that give no other row; nothing if prompts are not derived."""
        is_wanted = into is None or "prompts" in into
        if not rows or not is_wanted or not self._derived["prompts"]:
            return
        ids = [content_id("prompts", row) for row in rows]
        table = pa.table({"id": ids}, schema=PROMPT_ONLY_SCHEMA)
        self._table(PROMPT_ONLY, PROMPT_ONLY_SCHEMA).write(table)
        prompts = derive("prompts", rows, self._seen["prompts"])
        self.append("prompts", prompts)


def fair_shares(sizes: Sequence[int], limit: int | None, weights: Sequence[float]) -> list[int]:
    """Return how many of ``limit`` rows each source gives, in proportion to its weight.

    A source that has fewer gives all it has.

    Args:
        sizes: How many rows each source has.
        limit: How many are wanted in all; None means all of them.
        weights: By source.
    """
    if limit is None:
        return list(sizes)
    shares = list(sizes)
    left = min(limit, sum(sizes))
    waiting = list(range(len(sizes)))
    while waiting:
        total = sum(weights[source] for source in waiting)
        quotas = {}
        larger = []
        for source in waiting:
            quotas[source] = round(left * weights[source] / total, 9)
            if sizes[source] > quotas[source]:
                larger.append(source)
        if larger == waiting:
            for source in waiting:
                shares[source] = int(quotas[source])
            rounded_up = left - sum(shares[source] for source in waiting)
            # The largest remainders are rounded up; of equal ones the first.
            waiting.sort(key=lambda source: shares[source] - quotas[source])
            for source in waiting[:rounded_up]:
                shares[source] += 1
            break
        for source in waiting:
            if source not in larger:
                left -= sizes[source]
        waiting = larger
    return shares


@dataclass
class CountedSource:
    """A source, what became of its rows, and how they are taken."""

    counts: RowCounts
    options: SourceOptions = field(default_factory=SourceOptions)

    def take(self, part: FileRows) -> list[dict[str, Any]]:
        """Return the rows of a part within the cap, with their records' places; count the others."""
        before = self.counts.kept - len(part.rows)
        if self.options.cap is not None:
            self.counts.cut_to(self.options.cap)
        kept = self.counts.kept - before
        rows = []
        for row, position in zip(part.rows[:kept], part.positions, strict=False):
            rows.append(row | {"path": part.counts.source, "position": position})
        return rows

    def prompts_within_cap(
        self, part: FileRows, taken: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the prompts that are all a record gives, up to the record that fills the cap."""
        prompts = [row | {"path": part.counts.source} for row in part.prompt_only]
        cap = self.options.cap
        if cap is None or self.counts.kept < cap:
            return prompts
        last = taken[-1]["position"] if taken else 0
        return [row for row in prompts if row["position"] < last]

    def about(self, rows: int, licence: str | None) -> dict[str, Any]:
        """Return what the manifest says of the source and its share of the kind's ``rows``."""
        options = self.options
        about = self.counts.as_dict() | unused_summary(self.counts.unused)
        about["weight"] = options.weight
        about["cap"] = options.cap
        if rows:
            about["share"] = self.counts.kept / rows
        else:
            about["share"] = 0.0
        may_be_unset = {
            "category": options.category,
            "derive": options.derive,
            "licence": options.licence or licence,
        }
        for name, value in may_be_unset.items():
            if value is not None:
                about[name] = value
        return about


def write_sources(
    raw: RawFolder, kind: str, sources: Iterable[tuple[Iterable[FileRows], SourceOptions]]
) -> list[CountedSource]:
    """Write the rows of the sources of a kind up to their caps, and return the counts of each.

    With a limit, the rows of each source wait in a file until all sources are read, because the
    share of each depends on the sizes of all.

    Args:
        sources: The parts of each source, and its options.
    """
    written: list[CountedSource] = []
    spools: list[tuple[_Spool, _Spool]] = []
    Append = Callable[[Sequence[dict[str, Any]]], None]
    for number, (parts, options) in enumerate(sources):
        source: CountedSource | None = None
        with ExitStack() as stack:
            append: Append = partial(raw.append, kind, into=options.derive)
            append_prompts: Append = partial(raw.append_prompts, into=options.derive)
            if raw.limit is not None:
                place = raw.folder / kind
                rows_file = place / f"source-{number}.rows"
                prompts_file = place / f"source-{number}.prompts"
                waiting_rows = _Spool(rows_file, kind, raw.limit, stack)
                waiting_prompts = _Spool(prompts_file, "prompts", raw.limit, stack)
                append = waiting_rows.append
                append_prompts = waiting_prompts.append
                spools.append((waiting_rows, waiting_prompts))
            for part in parts:
                if source is None:
                    source = CountedSource(part.counts, options)
                    written.append(source)
                rows = source.take(part)
                append(rows)
                append_prompts(source.prompts_within_cap(part, rows))
                refused = findings_table(part.refused, REFUSED_SCHEMA)
                raw.refused.write(refused)
    if raw.limit is None:
        return written
    sizes = [source.counts.kept for source in written]
    weights = [source.options.weight for source in written]
    shares = fair_shares(sizes, raw.limit, weights)
    for number, source in enumerate(written):
        waiting_rows, _ = spools[number]
        for rows in waiting_rows.taken(shares[number]):
            raw.append(kind, rows, source.options.derive)
        source.counts.cut_to(shares[number])
    for number, source in enumerate(written):
        _, waiting_prompts = spools[number]
        for rows in waiting_prompts.taken(raw.limit):
            raw.append_prompts(rows, source.options.derive)
    return written


class _Spool:
    """The first ``limit`` rows of a source in a file, until it is decided how many are taken."""

    def __init__(self, path: Path, kind: str, limit: int, stack: ExitStack) -> None:
        self.path = path
        self.kind = kind
        self._left = limit
        place = pa.schema({"path": pa.string(), "position": pa.int64()})
        schema = pa.unify_schemas([arrow_schema(kind), place])
        self._table = stack.enter_context(TableWriter(path, schema))

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows with their ``path`` and ``position``, up to the limit."""
        kept = rows[: self._left]
        for table in tables_of(self.kind, kept, self._table.schema):
            self._table.write(table)
        self._left -= len(kept)

    def taken(self, count: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the first rows in parts, all rows of a record in one part, and remove the file."""
        yield from whole_records(self._first(count))
        self.path.unlink()

    def _first(self, left: int) -> Iterator[list[dict[str, Any]]]:
        for table in table_chunks(self.path):
            if left <= 0:
                return
            yield table.slice(0, left).to_pylist()
            left -= table.num_rows


@dataclass(frozen=True)
class Origins:
    """The records that the rows of a kind were read from, in the order of the rows.

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
        source = self.sources[self.source[row]]
        return {"source": source, "position": int(self.position[row])}


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
        """Return all rows of a file; ``DataError`` if it is missing or lacks columns."""
        stored_schema, rows = parquet_footer(path)
        names = arrow_schema(kind).names
        missing = [name for name in names if name not in stored_schema.names]
        if missing:
            raise DataError(f"{path} lacks the column {', '.join(missing)}; collect the data again")
        stored = cls(kind, path, rows)
        stored._as_schema(stored_schema.empty_table(), names)  # or DataError
        return stored

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        if self.kept is None:
            return self.stored
        return int(self.kept.sum())

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Their numbers in the file."""
        if self.kept is None:
            return np.arange(self.stored)
        return np.flatnonzero(self.kept)

    def origin(self, number: int) -> dict[str, Any]:
        """Return ``source`` and ``position`` of a row by its number in the file; empty if unknown."""
        if self.origins is None:
            return {}
        return self.origins[number]

    def where(self, keep: npt.NDArray[np.bool_]) -> StoredRows:
        """Return the rows for which ``keep`` (one value for each) is true."""
        kept = np.zeros(self.stored, dtype=bool)
        kept[self.numbers[keep]] = True
        return replace(self, kept=kept)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows in order, some thousand at a time, with all columns of the kind or some.

        Raises:
            DataError: The file is damaged, or a value is not of its column's type.
        """
        names = list(columns or arrow_schema(self.kind).names)
        start = 0
        for table in table_chunks(self.path, names):
            end = start + table.num_rows
            if self.kept is not None:
                is_kept = pa.array(self.kept[start:end])
                table = table.filter(is_kept)
            start = end
            if table.num_rows:
                yield self._as_schema(table, names)

    def _as_schema(self, table: pa.Table, names: Sequence[str]) -> pa.Table:
        of_kind = arrow_schema(self.kind)
        schema = pa.schema([of_kind.field(name) for name in names])
        try:
            return table.select(names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise DataError(
                f"{self.path} has columns of other types than the schema's: {first_line(error)}"
            ) from error


@dataclass(frozen=True)
class RawData:
    """What the collect stage wrote.

    Attributes:
        refused: The file of rows that readers refused.
        derived: The kinds that are derived from others.
        of_files: For kinds that are also derived, how many of their first rows are from files.
        cut: How many rows of a kind ``collect.limit`` left out.
        prompt_only: Ids of derived prompts whose records give no other row.
    """

    rows: Mapping[str, StoredRows]
    refused: Path
    derived: Collection[str] = ()
    of_files: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)
    prompt_only: Collection[str] = ()


def read_raw(raw: Path) -> RawData:
    """Open the folder ``data/raw``; ``DataError`` if a file is missing or does not fit."""
    rows = {}
    for kind in ROW_TYPES:
        rows[kind] = StoredRows.of_file(kind, raw / kind / "data.parquet")
    origins = _read_provenance(raw / "provenance.parquet")
    for kind, listed in origins.items():
        if len(listed) != rows[kind].num_rows:
            raise DataError(
                f"{raw}/provenance.parquet does not fit the rows of {kind}; collect the data again"
            )
        rows[kind] = replace(rows[kind], origins=listed)
    manifest = raw / "manifest.json"
    kinds = {}
    if manifest.is_file():
        kinds = read_json(manifest)["kinds"]
    derived = []
    of_files = {}
    cut = {}
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
    """Return the rows of a file in parts; none if there is no such file."""
    if path.exists():
        return table_chunks(path, columns)
    return ()


def _read_provenance(path: Path) -> dict[str, Origins]:
    """Return the origins of the rows of each kind; none where the rows are from no file."""
    if not path.exists():
        return {}
    # A name is held once, not once for each row.
    texts = ["kind", "source"]
    with readable(path), pq.ParquetFile(path, read_dictionary=texts, pre_buffer=False) as file:
        table = file.read([*texts, "position"], use_threads=False).unify_dictionaries()
    origins = {}
    for kind in table["kind"].unique().to_pylist():
        rows = table.filter(pc.equal(table["kind"], kind))
        sources = rows["source"].combine_chunks()
        positions = rows["position"].to_numpy()
        origins[kind] = Origins(
            sources.dictionary.to_pylist(), sources.indices.to_numpy(), positions
        )
    return origins


def read_refused(path: Path) -> Iterator[list[RowFinding]]:
    """Yield in parts the rows that readers refused; a missing file means that there are none."""
    for table in _chunks_of(path):
        findings = []
        for row in table.select(REFUSED_SCHEMA.names).to_pylist():
            place = f"{row['source']}:{row['position']}"
            findings.append(RowFinding(READABLE, **row, id=place))
        yield findings


def count_refused(path: Path) -> Counter[str]:
    """Return how many rows of each kind readers refused."""
    counts: Counter[str] = Counter()
    for table in _chunks_of(path, ["kind"]):
        counts.update(table.column("kind").to_pylist())
    return counts

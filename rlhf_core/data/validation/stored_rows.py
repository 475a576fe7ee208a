"""Rows of collected and validated files: where each came from, as stored, in quarantine, and their lengths."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.lengths import PERCENTILES, LengthPercentiles, evenly_spread, token_counts
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS, arrow_schema, write_table
from rlhf_core.data.tables import TableWriter, table_chunks
from rlhf_core.errors import DataError, UnwritableText
from rlhf_core.runtime.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StoredRows:
    """Rows of a kind.

    Attributes:
        stored: How many rows the file has.
        kept: By row of the file, whether it is one of these (N,); None for all.
    """

    kind: str
    path: Path
    stored: int
    kept: npt.NDArray[np.bool_] | None = None

    @classmethod
    def of_file(cls, kind: str, path: Path) -> StoredRows:
        """All rows of a file; ``DataError`` when it is missing or has other columns than those of ``kind``."""
        if not path.is_file():
            raise DataError(f"{path} does not exist; run the stage that writes it")
        try:
            with pq.ParquetFile(path) as file:
                stored_schema, rows = file.schema_arrow, file.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is not a readable parquet file ({error}); run the stage that writes it again"
            ) from error
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

    def where(self, keep: npt.NDArray[np.bool_]) -> StoredRows:
        """Those of the rows for which ``keep`` (one value for each) holds."""
        kept = np.zeros(self.stored, dtype=bool)
        kept[self.numbers[keep]] = True
        return replace(self, kept=kept)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows in order, some thousand at a time, with all columns of the kind or some of them.

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
            raise DataError(f"{self.path} has columns of other types than the schema's: {error}") from error


PROVENANCE_SCHEMA = pa.schema(
    [("kind", pa.string()), ("id", pa.string()), ("source", pa.string()), ("position", pa.int64())]
)
# Ids of derived prompts whose records give no other row: nothing that they come from can fail validation.
PROMPT_ONLY = "prompt_only.parquet"
PROMPT_ONLY_SCHEMA = pa.schema([("id", pa.string())])


@dataclass(frozen=True)
class Origin:
    """The file that a row was read from, as params.yaml spells it, and the line or number of the row there."""

    source: str
    position: int

    def __str__(self) -> str:
        return f"{self.source}:{self.position}"


@dataclass(frozen=True)
class Origins:
    """The origins of the rows of a kind, in their order.

    Attributes:
        sources: The files.
        source: By row, the number of its file (N,).
        position: By row, its position there (N,).
    """

    sources: Sequence[str]
    source: npt.NDArray[np.int32]
    position: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, row: int) -> Origin:
        return Origin(self.sources[self.source[row]], int(self.position[row]))


def provenance_table(kind: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the ``path`` and ``position`` of rows of a kind as they are stored."""
    listed = [{"kind": kind, "id": row["id"], "source": row["path"], "position": row["position"]} for row in rows]
    return pa.Table.from_pylist(listed, schema=PROVENANCE_SCHEMA)


def read_provenance(path: Path) -> dict[str, Origins]:
    """Return the origins of the rows of each kind; none where the rows are from no file."""
    numbers: dict[str, int] = {}
    parts: dict[str, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]] = {}
    for chunk in table_chunks(path, ["kind", "source", "position"]) if path.exists() else ():
        kinds = chunk.column("kind").to_numpy()
        source = np.array([numbers.setdefault(s, len(numbers)) for s in chunk.column("source").to_pylist()], np.int32)
        position = chunk.column("position").to_numpy()
        for kind in dict.fromkeys(kinds):
            parts.setdefault(kind, []).append((source[kinds == kind], position[kinds == kind]))
    names = list(numbers)
    return {
        kind: Origins(names, np.concatenate([s for s, _ in listed]), np.concatenate([p for _, p in listed]))
        for kind, listed in parts.items()
    }


def read_prompt_only(path: Path) -> frozenset[str]:
    """Return the ids of the prompts whose records give no other row; none where there is no such file."""
    chunks = table_chunks(path) if path.exists() else ()
    return frozenset(row_id for table in chunks for row_id in table.column("id").to_pylist())


REFUSED_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("source", pa.string()),
        ("position", pa.int64()),
        ("reason", pa.string()),
        ("row", pa.string()),
    ]
)
QUARANTINE_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("position", pa.int64()),
        ("reasons", pa.list_(pa.string())),
        ("row", pa.string()),
    ]
)


@dataclass(frozen=True)
class Quarantined:
    """One refused row: kind, id (``FILE:POSITION`` where it never became a row), reasons, and content as JSON.

    ``source`` and ``position`` are the file and line that it was read from, None for rows of no file.
    """

    kind: str
    id: str
    reasons: list[str]
    row: str
    source: str | None = None
    position: int | None = None


def refused_table(refused: Sequence[RowFinding]) -> pa.Table:
    """Return rows that readers refused as they are stored."""
    return pa.Table.from_pylist([vars(row) for row in refused], schema=REFUSED_SCHEMA)


def write_refused(path: Path, refused: Sequence[RowFinding]) -> None:
    """Write the rows that readers refused."""
    write_table(path, refused_table(refused))


def read_refused(path: Path) -> Iterator[list[Quarantined]]:
    """Yield the rows that readers refused in parts, as quarantined rows; a missing file means that there are none."""
    for table in table_chunks(path) if path.exists() else ():
        yield [
            Quarantined(
                row["kind"],
                f"{row['source']}:{row['position']}",
                [row["reason"]],
                row["row"],
                row["source"],
                row["position"],
            )
            for row in table.to_pylist()
        ]


def count_refused(path: Path) -> Counter[str]:
    """Return how many rows of each kind readers refused."""
    chunks = table_chunks(path, ["kind"]) if path.exists() else ()
    return Counter(kind for table in chunks for kind in table.column("kind").to_pylist())


def quarantine_rows(
    kind: str, table: pa.Table, numbers: Sequence[int], reasons: Mapping[int, Sequence[str]], origins: Origins | None
) -> list[Quarantined]:
    """Return rows of a kind with their reasons and where they come from.

    Args:
        table: The rows to return.
        numbers: Their numbers among all rows of the kind.
        reasons: By number of a row, why it is refused.
        origins: Those of all rows of the kind; None for rows of no file.
    """
    quarantined = []
    for number, row in zip(numbers, table.to_pylist(), strict=True):
        text = json.dumps(row, ensure_ascii=False, default=str)
        origin = vars(origins[number]) if origins is not None else {}
        quarantined.append(Quarantined(kind, str(row.get("id")), list(reasons[number]), text, **origin))
    return quarantined


def write_quarantine(path: Path, parts: Iterable[Sequence[Quarantined]]) -> None:
    """Write ``data/quarantine.parquet`` (see :class:`Quarantined`); an empty file when nothing was refused."""
    with TableWriter(path, QUARANTINE_SCHEMA) as writer:
        for rows in parts:
            writer.write(pa.Table.from_pylist([vars(row) for row in rows], schema=QUARANTINE_SCHEMA))


UNWRITABLE = "writable_by_tokenizer"  # what findings.parquet calls them: no rule, since not every row is looked at
COUNTED_ROWS = 20_000  # of a kind; a percentile of as many is off by less than one per cent of the rows


@dataclass
class KindTokens:
    """Tokens of rows of a kind.

    Attributes:
        rows: How many rows there are.
        looked_at: How many of them were tokenised.
        lengths: By text column, and for the sequence that training sees, the tokens of each row that can be written.
        unwritable: The others, in order.
    """

    rows: int
    looked_at: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)
    unwritable: list[RowFinding] = field(default_factory=list)


@dataclass(frozen=True)
class CountedTokens:
    """Tokens of the clean rows by kind, and what the tokenizer that counted them is called."""

    tokenizer: str
    kinds: Mapping[str, KindTokens]

    def metrics(self, kind: str) -> dict[str, float]:
        """Return ``COLUMN_tokens_PERCENTILE`` for each text column of ``kind``, and for the whole sequence."""
        return {
            f"{name.replace(' + ', '_and_')}_tokens_{percentile}": float(value)
            for name, lengths in self.kinds[kind].lengths.items()
            for percentile, value in zip(PERCENTILES, LengthPercentiles.of(name, lengths).values, strict=True)
        }

    def findings(self) -> list[RowFinding]:
        """Return the rows that the tokenizer cannot write, as ``findings.parquet`` holds them."""
        return [finding for counted in self.kinds.values() for finding in counted.unwritable]


def count_tokens(
    clean: Mapping[str, StoredRows], tokenizer: PreTrainedTokenizerBase, name: str, origins: Mapping[str, Origins]
) -> CountedTokens:
    """Tokenise the clean rows as training does, part by part.

    Args:
        name: What the card calls the tokenizer.
        origins: The file and line of every raw row, by kind; none for kinds of no file.
    """
    kinds = {kind: KindTokens(rows.num_rows) for kind, rows in clean.items() if rows.num_rows}
    with progress(sum(min(counted.rows, COUNTED_ROWS) for counted in kinds.values()), "counting tokens") as bar:
        for kind, counted in kinds.items():
            chosen = np.zeros(counted.rows, dtype=bool)
            chosen[evenly_spread(counted.rows, COUNTED_ROWS)] = True
            rows = clean[kind].where(chosen)
            raw_numbers, known = rows.numbers, origins.get(kind)
            for part in rows.parts(["id", *CONTENT_FIELDS[kind]]):
                for number, row in zip(raw_numbers[counted.looked_at :], part.to_pylist(), strict=False):
                    try:
                        tokens = token_counts(tokenizer, kind, row)
                    except UnwritableText as error:
                        origin = vars(known[int(number)]) if known is not None else {}
                        counted.unwritable.append(
                            RowFinding(UNWRITABLE, kind, error.reason, id=row["id"], severity="warn", **origin)
                        )
                        continue
                    for column, count in tokens.items():
                        counted.lengths.setdefault(column, []).append(count)
                counted.looked_at += part.num_rows
                bar.advance(part.num_rows)
    return CountedTokens(name, kinds)

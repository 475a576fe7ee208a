"""Rows of collected and validated files: where each came from, as stored, in quarantine, and their lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlhf_core.data.row_counts import READABLE, RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS, arrow_schema
from rlhf_core.data.statistics import TokenCounts, evenly_spread
from rlhf_core.data.tables import TableWriter, parquet_footer, table_chunks
from rlhf_core.errors import DataError
from rlhf_core.runtime.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        """All rows of a file; ``DataError`` when it is missing or has other columns than those of ``kind``."""
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
        """The ``source`` and ``position`` that the row of this number in the file was read from; empty for none."""
        return {} if self.origins is None else self.origins[number]

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


TEXT = pa.string()
PROVENANCE_SCHEMA = pa.schema({"kind": TEXT, "id": TEXT, "source": TEXT, "position": pa.int64()})
# Ids of derived prompts whose records give no other row: nothing that they come from can fail validation.
PROMPT_ONLY = "prompt_only.parquet"
PROMPT_ONLY_SCHEMA = pa.schema({"id": TEXT})


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


REFUSED_SCHEMA = pa.schema({"kind": TEXT, "source": TEXT, "position": pa.int64(), "reason": TEXT, "row": TEXT})
QUARANTINE_SCHEMA = pa.schema(
    {"kind": TEXT, "id": TEXT, "source": TEXT, "position": pa.int64(), "reasons": pa.list_(TEXT), "row": TEXT}
)
FINDINGS_SCHEMA = pa.schema(
    dict.fromkeys(("rule", "severity", "kind", "id", "source"), TEXT)
    | {"position": pa.int64(), "reason": TEXT, "other": TEXT, "similarity": pa.float64()}
)


def findings_table(findings: Sequence[RowFinding], schema: pa.Schema) -> pa.Table:
    """Return findings as they are stored, with the columns of ``schema``."""
    return pa.Table.from_pylist(
        [{name: getattr(finding, name) for name in schema.names} for finding in findings], schema=schema
    )


def read_refused(path: Path) -> Iterator[list[RowFinding]]:
    """Yield the rows that readers refused in parts; a missing file means that there are none."""
    for table in table_chunks(path) if path.exists() else ():
        yield [
            RowFinding(
                READABLE, **{name: row[name] for name in REFUSED_SCHEMA.names}, id=f"{row['source']}:{row['position']}"
            )
            for row in table.to_pylist()
        ]


def count_refused(path: Path) -> Counter[str]:
    """Return how many rows of each kind readers refused."""
    chunks = table_chunks(path, ["kind"]) if path.exists() else ()
    return Counter(kind for table in chunks for kind in table.column("kind").to_pylist())


def write_quarantine(path: Path, parts: Iterable[Sequence[RowFinding]]) -> None:
    """Write ``data/quarantine.parquet``: every refused row with its reasons; an empty file when there is none."""
    with TableWriter(path, QUARANTINE_SCHEMA) as writer:
        for rows in parts:
            writer.write(findings_table(rows, QUARANTINE_SCHEMA))


COUNTED_ROWS = 20_000  # of a kind; a percentile of as many is off by less than one per cent of the rows


def count_tokens(clean: Mapping[str, StoredRows], tokenizer: PreTrainedTokenizerBase) -> dict[str, TokenCounts]:
    """Tokenise the clean rows of every kind that has some as training does, part by part."""
    kinds = {kind: TokenCounts(kind, rows.num_rows) for kind, rows in clean.items() if rows.num_rows}
    with progress(sum(min(counted.rows, COUNTED_ROWS) for counted in kinds.values()), "counting tokens") as bar:
        for kind, counted in kinds.items():
            chosen = np.zeros(counted.rows, dtype=bool)
            chosen[evenly_spread(counted.rows, COUNTED_ROWS)] = True
            rows = clean[kind].where(chosen)
            numbers = iter(rows.numbers)
            for part in rows.parts(["id", *CONTENT_FIELDS[kind]]):
                for row in part.to_pylist():
                    counted.add(tokenizer, row | rows.origin(next(numbers)))
                bar.advance(part.num_rows)
    return kinds

"""Token ids of the rows of a data file, column by column, as Arrow lists of 32-bit integers."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chunks import bytes_in_memory, chunked, table_slices
from rlhf_core.data.schema import CONTENT_FIELDS, Demonstration, Message, Preference, PretrainText, Prompt
from rlhf_core.data.tables.table_stream import table_chunks
from rlhf_core.data.tokens.batch_encoding import content_columns, encode_columns
from rlhf_core.errors import DataError

BATCH_ROWS = 2048  # rows that are tokenised together: more were no faster, and each holds Python lists meanwhile
BATCH_BYTES = 8 * 2**20  # of their texts: a token takes a hundred bytes and more until it is in an array
IDS = pa.list_(pa.int32())
CATEGORY = "category"  # the one column that is text


@dataclass(frozen=True)
class TokenTable:
    """Rows of token ids. Of a memory-mapped table only the pages that are read take memory, once for all processes."""

    table: pa.Table

    @classmethod
    def of_rows(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        kind: str,
        rows: Sequence[Preference | Demonstration | Prompt | PretrainText],
    ) -> TokenTable:
        """Tokenise rows of ``kind`` that are in memory."""
        parts = chunked(rows, BATCH_ROWS, bytes_in_memory, BATCH_BYTES)
        batches = [
            token_batch(kind, encode_columns(tokenizer, content_columns(kind, part)), [row.category for row in part])
            for part in parts
        ]
        return cls(pa.Table.from_batches(batches, token_schema(kind)))

    @classmethod
    def of_file(cls, tokenizer: PreTrainedTokenizerBase, kind: str, path: Path) -> TokenTable:
        """Tokenise a parquet file of clean data; see :func:`encode_file`."""
        return cls(pa.Table.from_batches(encode_file(tokenizer, kind, path), token_schema(kind)))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def id_columns(self) -> list[str]:
        """Names of the columns of token ids."""
        return [name for name in self.table.column_names if name != CATEGORY]

    def column(self, name: str) -> TokenColumn:
        """The ids of one column, such as ``chosen``."""
        return TokenColumn(self.table.column(name))

    def categories(self) -> list[str]:
        """The category of each row."""
        return list(self.table.column(CATEGORY).to_pylist())


class TokenColumn(Sequence[Sequence[int]]):
    """Token ids row by row; a row is read when it is asked for, as an array of 32-bit integers.

    Attributes:
        lengths: Tokens of each row, int32 (N,).
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._parts = [(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in chunks]
        self._ends = list(accumulate(len(chunk) for chunk in chunks))
        counts = [np.diff(offsets) for offsets, _ in self._parts]
        self.lengths: npt.NDArray[np.int32] = np.concatenate(counts) if counts else np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, row: int) -> Sequence[int]: ...

    @overload
    def __getitem__(self, row: slice) -> list[Sequence[int]]: ...

    def __getitem__(self, row: int | slice) -> Sequence[int] | list[Sequence[int]]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        row = range(len(self))[row]
        part = bisect_right(self._ends, row)
        offsets, values = self._parts[part]
        local = row - (self._ends[part - 1] if part else 0)
        return array("i", values[offsets[local] : offsets[local + 1]].tobytes())

    def __iter__(self) -> Iterator[Sequence[int]]:
        for offsets, values in self._parts:
            bounds = offsets.tolist()
            for begin, end in pairwise(bounds):
                yield array("i", values[begin:end].tobytes())


def token_schema(kind: str) -> pa.Schema:
    """The Arrow schema of ``kind``: a list of 32-bit integers for each column of content, and the category."""
    return pa.schema([*((name, IDS) for name in CONTENT_FIELDS[kind]), (CATEGORY, pa.string())])


def token_batch(kind: str, columns: dict[str, list[list[int]]], categories: Sequence[str]) -> pa.RecordBatch:
    """Token ids of some rows and their categories as an Arrow record batch."""
    ids = [pa.array(columns[name], IDS) for name in CONTENT_FIELDS[kind]]
    return pa.record_batch([*ids, pa.array(categories, pa.string())], schema=token_schema(kind))


def encode_file(tokenizer: PreTrainedTokenizerBase, kind: str, path: Path) -> Iterator[pa.RecordBatch]:
    """Tokenise a parquet file of clean data, some thousand rows at a time, fewer where they are long.

    Raises:
        DataError: The file is missing, unreadable or of another kind.
        UnwritableText: The tokenizer cannot write one of its rows.
    """
    names = [*CONTENT_FIELDS[kind], CATEGORY]
    if not path.is_file():
        raise DataError(f"{path} does not exist; run the stage that writes it")
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{path} has no column {', '.join(missing)}: it is not a file of {kind}")
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path} is not a readable parquet file ({error}); run the stage that writes it again"
        ) from error
    for table in table_chunks(path, names):
        for part in table_slices(table, BATCH_ROWS, BATCH_BYTES):
            columns = part.to_pydict()
            categories = columns.pop(CATEGORY)
            if "prompt" in columns:
                turns = columns["prompt"]
                columns["prompt"] = [[Message(m["role"], m["content"]) for m in messages] for messages in turns]
            yield token_batch(kind, encode_columns(tokenizer, columns), categories)

"""Token ids of data files as Arrow lists, made once, memory-mapped, and shared by all ranks.

An entry of the cache is a folder ``KEY/`` with ``tokens.arrow``, an Arrow stream that
``datasets.Dataset.from_file`` opens too, and ``entry.json``, which says what it was made of. The
key is a hash of the data file, of everything in the tokenizer's files (chat template, special and
stop tokens, truncation settings), of the code that encodes and of the versions of the libraries.
Limits of length are not part of it: they apply to what is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.encoding import encode_columns
from rlhf_core.data.schema import (
    CLEAN_NAMES,
    CONTENT_FIELDS,
    Demonstration,
    Preference,
    PretrainText,
    Prompt,
    as_dict,
    columns_of,
    plain_table,
    require_columns,
    tables_of,
)
from rlhf_core.data.tables import (
    parquet_footer,
    require_data_file,
    table_chunks,
    table_slices,
)
from rlhf_core.data.token_folder import RECORD
from rlhf_core.errors import DataError
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import (
    LockFile,
    atomic_dir,
    atomic_write_json,
    read_json,
    scratch_folder,
    sha256_file,
)

BATCH_ROWS = 2048  # rows that are tokenised together: more were no faster, and each holds Python lists meanwhile
BATCH_BYTES = (
    8 * 2**20
)  # of their texts: a token takes a hundred bytes and more until it is in an array
IDS = pa.list_(pa.int32())
CATEGORY = "category"  # the one column that is text


@dataclass(frozen=True)
class TokenTable:
    """Rows of token ids.

    Of a memory-mapped table only the pages that are read take memory, once for all processes.
    """

    table: pa.Table

    @classmethod
    def of_rows(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        kind: str,
        rows: Sequence[Preference | Demonstration | Prompt | PretrainText],
    ) -> TokenTable:
        """Tokenise rows of ``kind`` that are in memory."""
        tables = tables_of(kind, map(as_dict, rows))
        return cls(pa.Table.from_batches(_encoded(tokenizer, kind, tables), token_schema(kind)))

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
        self._column = column
        self.lengths: npt.NDArray[np.int32] = pc.list_value_length(column).to_numpy()

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, row: int) -> Sequence[int]: ...

    @overload
    def __getitem__(self, row: slice) -> list[Sequence[int]]: ...

    def __getitem__(self, row: int | slice) -> Sequence[int] | list[Sequence[int]]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        # A row of datasets.Dataset takes 17 times as long as this one, or 100 times as NumPy's.
        return array("i", self._column[row].values.to_numpy().tobytes())


def token_schema(kind: str) -> pa.Schema:
    """Return the Arrow schema of ``kind``: lists of 32-bit integers, and the category."""
    return pa.schema([*((name, IDS) for name in CONTENT_FIELDS[kind]), (CATEGORY, pa.string())])


def encode_file(
    tokenizer: PreTrainedTokenizerBase, kind: str, path: Path
) -> Iterator[pa.RecordBatch]:
    """Tokenise a file of clean data, some thousand rows at a time, fewer where they are long.

    Raises:
        DataError: The file is missing, unreadable or of another kind.
        UnwritableText: The tokenizer cannot write one of its rows.
    """
    names = [CLEAN_NAMES.get(name, name) for name in (*CONTENT_FIELDS[kind], CATEGORY)]
    require_columns(path, kind, names, parquet_footer(path)[0].names)
    yield from _encoded(
        tokenizer, kind, (plain_table(path, kind, table) for table in table_chunks(path, names))
    )


def _encoded(
    tokenizer: PreTrainedTokenizerBase, kind: str, tables: Iterable[pa.Table]
) -> Iterator[pa.RecordBatch]:
    for table in tables:
        for part in table_slices(table, BATCH_ROWS, BATCH_BYTES):
            texts = columns_of(part.select(CONTENT_FIELDS[kind]))
            ids = [pa.array(values, IDS) for values in encode_columns(tokenizer, texts).values()]
            category = part.column(CATEGORY).combine_chunks()
            yield pa.record_batch([*ids, category], schema=token_schema(kind))


logger = logging.getLogger(__name__)

STREAM = "tokens.arrow"
CODE = ("chat_template.py", "encoding.py", "token_tables.py")
LIBRARIES = ("transformers", "tokenizers", "jinja2")
# Where a tokenizer was loaded from: no token depends on it.
ORIGIN = ("name_or_path", "is_local", "local_files_only")


def read_tokens(
    folder: Path | None, path: Path, kind: str, tokenizer: PreTrainedTokenizerBase
) -> TokenTable:
    """Return the token ids of each row of a parquet file of ``kind``; all ranks must call it.

    Rank 0 makes an entry that is missing or damaged, and the others wait for it.

    Args:
        folder: The cache; None keeps nothing, and each rank tokenises for itself.
        tokenizer: Its chat template writes prompts and replies.

    Raises:
        DataError: The file cannot be read, or the tokenizer cannot write one of its rows.
    """
    require_data_file(path)
    if folder is None:
        return TokenTable(
            pa.Table.from_batches(encode_file(tokenizer, kind, path), token_schema(kind))
        )
    entry = ""
    ready = False
    try:
        if distributed.is_rank_zero():
            made_of = contents(path, kind, tokenizer)
            entry = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
            make_entry(folder / entry, made_of, path, tokenizer)
            ready = True
    finally:
        entry, ready = distributed.broadcast_from_rank0([entry, ready])
    if not ready:
        raise DataError(f"{path} could not be tokenised; rank 0 says why")
    with pa.memory_map(
        str(folder / entry / STREAM)
    ) as source:  # a page is read when it is first asked for
        return TokenTable(pa.ipc.open_stream(source).read_all())


def contents(path: Path, kind: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the tokens of a file depend on."""
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in CODE)
    return {
        "kind": kind,
        "data": sha256_file(path),
        "tokenizer": tokenizer_digest(tokenizer),
        "code": hashlib.sha256(code).hexdigest(),
        "libraries": {name: version(name) for name in LIBRARIES},
    }


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's files as it would be saved, chat template included."""
    digest = hashlib.sha256()
    with scratch_folder("rlhf-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = file.read_bytes()
            if file.name == "tokenizer_config.json":
                settings = {
                    key: value for key, value in json.loads(content).items() if key not in ORIGIN
                }
                content = json.dumps(settings, sort_keys=True).encode()
            digest.update(
                f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content
            )
    return digest.hexdigest()


def make_entry(
    entry: Path, made_of: Mapping[str, Any], path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Tokenise ``path`` into the folder ``entry``, as a whole, unless it is there and sound.

    Of several processes one makes it, and the others wait.
    """
    with LockFile(entry.with_name(f".{entry.name}.lock")) as lock:
        lock.acquire()
        problem = damage(entry, made_of)
        if problem is None:
            os.utime(entry / RECORD)
            return
        if problem:
            logger.warning("the tokens of %s in %s %s: tokenising again", path, entry, problem)
        for leftover in entry.parent.glob(f".{entry.name}.*.part"):
            shutil.rmtree(
                leftover, ignore_errors=True
            )  # of a process that was killed, since the lock is ours
        started = time.perf_counter()
        rows = 0
        kind = str(made_of["kind"])
        with atomic_dir(entry) as folder:
            with (
                pa.OSFile(str(folder / STREAM), "wb") as file,
                pa.ipc.new_stream(file, token_schema(kind)) as stream,
            ):
                for batch in encode_file(tokenizer, kind, path):
                    stream.write_batch(batch)
                    rows += batch.num_rows
            made = {"made_of": dict(made_of), "path": str(path.resolve()), "rows": rows}
            atomic_write_json(folder / RECORD, made | {"sha256": sha256_file(folder / STREAM)})
        logger.info("tokenised %d rows of %s in %.1f s", rows, path, time.perf_counter() - started)


def damage(entry: Path, made_of: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an entry: None if it is sound, an empty text if it is not there."""
    if not entry.exists():
        return ""
    try:
        record = read_json(entry / RECORD)
        if record["made_of"] != made_of:
            return "are of other data"
        sound = sha256_file(entry / STREAM) == record["sha256"]
    except (DataError, OSError, KeyError, TypeError):
        sound = False
    return None if sound else "are damaged"

"""The kinds of rows in the data files of a workspace, their splits, and how files hold them.

Rows are split by prompt group: one hash decides, so all data sets of a run agree and no group is in
two splits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.tables import (
    CHUNK_BYTES,
    TableRows,
    TableWriter,
    bytes_in_memory,
    chunked,
    readable,
    rows_within,
)
from rlhf_core.errors import DataError

ROLES = ("system", "user", "assistant")
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@dataclass(frozen=True)
class Message:
    """One turn. ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True)
class Preference:
    """Two replies to the same prompt, the first preferred.

    ``margin`` is how strongly, where that is known.
    """

    KIND: ClassVar[str] = "preferences"
    id: str
    prompt: list[Message]
    chosen: str
    rejected: str
    margin: float | None
    category: str
    source: str
    group: str


@dataclass(frozen=True)
class Demonstration:
    """A reply to imitate."""

    KIND: ClassVar[str] = "demonstrations"
    id: str
    prompt: list[Message]
    reply: str
    category: str
    source: str
    group: str


@dataclass(frozen=True)
class Prompt:
    """Messages that end with the user's turn: what rollouts and evaluation start from.

    ``columns`` is what else the record says, for reward functions: a JSON object by column; None
    for nothing.
    """

    KIND: ClassVar[str] = "prompts"
    id: str
    prompt: list[Message]
    category: str
    source: str
    group: str
    columns: str | None = None


@dataclass(frozen=True)
class PretrainText:
    """Plain text."""

    KIND: ClassVar[str] = "pretrain"
    id: str
    text: str
    category: str
    source: str
    group: str


Row = TypeVar("Row", Preference, Demonstration, Prompt, PretrainText)
ROW_TYPES: dict[str, type[Preference] | type[Demonstration] | type[Prompt] | type[PretrainText]] = {
    cls.KIND: cls for cls in (Preference, Demonstration, Prompt, PretrainText)
}
REPLIES: dict[str, tuple[str, ...]] = {
    "preferences": ("chosen", "rejected"),
    "demonstrations": ("reply",),
    "prompts": (),
    "pretrain": (),
}
CONTENT_FIELDS = {kind: ("prompt", *replies) for kind, replies in REPLIES.items()} | {
    "pretrain": ("text",)
}
# What columns are called in clean files, where TRL expects another name, or would train on what may
# be null.
CLEAN_NAMES = {"reply": "completion", "margin": "preference_margin"}


def arrow_schema(kind: str) -> pa.Schema:
    """Return the parquet schema of raw rows: messages, a margin of float64, and strings."""
    special = {"prompt": MESSAGES, "margin": pa.float64()}
    types = {}
    for column in fields(ROW_TYPES[kind]):
        types[column.name] = special.get(column.name, pa.string())
    return pa.schema(types)


def clean_schema(kind: str) -> pa.Schema:
    """Return the parquet schema of clean rows, whose replies are lists of one message, for TRL."""
    return clean_table(kind, arrow_schema(kind).empty_table()).schema


def clean_table(kind: str, table: pa.Table) -> pa.Table:
    """Return raw rows as clean files hold them; see :func:`clean_schema`."""
    for name in REPLIES[kind]:
        table = _with_column(table, name, MESSAGES, _as_messages)
    names = [CLEAN_NAMES.get(name, name) for name in table.column_names]
    return table.rename_columns(names)


def plain_table(path: Path, kind: str, table: pa.Table) -> pa.Table:
    """Return columns of a clean file as raw rows have them: the inverse of :func:`clean_table`.

    Raises:
        DataError: A reply is not a list of one message.
    """
    raw_names = {clean: name for name, clean in CLEAN_NAMES.items()}
    names = [raw_names.get(name, name) for name in table.column_names]
    table = table.rename_columns(names)
    for name in REPLIES[kind]:
        if not _holds_single_messages(table.column(name)):
            raise DataError(
                f"{path}: {CLEAN_NAMES.get(name, name)} is not a list of one message; run validate again"
            )
        table = _with_column(table, name, pa.string(), _contents)
    return table


def _holds_single_messages(column: pa.ChunkedArray) -> bool:
    if column.type != MESSAGES:
        return False
    single = pc.equal(pc.list_value_length(column), 1)
    return bool(pc.all(single, min_count=0).as_py())


def _contents(messages: pa.Array) -> pa.Array:
    return pc.struct_field(pc.list_flatten(messages), "content")


def _with_column(
    table: pa.Table, name: str, form: pa.DataType, change: Callable[[pa.Array], pa.Array]
) -> pa.Table:
    """Replace a column chunk by chunk: all texts of a file may be more than one array can hold."""
    chunks = [change(chunk) for chunk in table.column(name).chunks]
    changed = pa.chunked_array(chunks, form)
    place = table.column_names.index(name)
    return table.set_column(place, name, changed)


def _as_messages(contents: pa.Array) -> pa.Array:
    roles = pa.repeat(pa.scalar("assistant"), len(contents))
    messages = pa.StructArray.from_arrays([roles, contents], fields=list(MESSAGES.value_type))
    offsets = pa.array(range(len(contents) + 1), pa.int32())
    return pa.ListArray.from_arrays(offsets, messages).cast(MESSAGES)


def content_id(kind: str, row: dict[str, Any]) -> str:
    """Return the first 16 hex digits of the sha256 of a row's prompt and replies, or its text."""
    content = [kind]
    for name in CONTENT_FIELDS[kind]:
        content.append(row[name])
    encoded = json.dumps(content, ensure_ascii=True, sort_keys=True).encode()
    return hashlib.sha256(encoded).hexdigest()[:16]


def write_dicts(path: Path, kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows given as dictionaries (messages too) to a raw file of ``kind``, atomically."""
    with TableWriter(path, arrow_schema(kind)) as writer:
        for table in tables_of(kind, rows):
            writer.write(table)


def tables_of(
    kind: str, rows: Iterable[dict[str, Any]], schema: pa.Schema | None = None
) -> Iterator[pa.Table]:
    """Yield rows given as dictionaries as arrow tables, by default of the schema of ``kind``."""
    schema = schema or arrow_schema(kind)
    for chunk in chunked(rows, sys.maxsize, bytes_in_memory):
        yield pa.Table.from_pylist(chunk, schema=schema)


def write_table(path: Path, table: pa.Table) -> None:
    """Write an arrow table to ``path``, atomically."""
    with TableWriter(path, table.schema) as writer:
        writer.write(table)


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a parquet file as an arrow table.

    Raises:
        DataError: It is missing or unreadable.
    """
    names = list(columns) if columns else None
    # Arrow's threads end the process, or wait forever, where there is no memory for one more.
    with readable(Path(path)), pq.ParquetFile(path, pre_buffer=False) as file:
        return file.read(columns=names, use_threads=False)


def read_rows(path: Path, cls: type[Row]) -> list[Row]:
    """Read all rows of a clean file as dataclasses of type ``cls``.

    Raises:
        DataError: The file is missing, unreadable or lacks a column.
    """
    return rows_of_table(read_kind(path, cls), cls)


def read_kind(path: Path, cls: type[Row]) -> pa.Table:
    """Read a clean file as an arrow table with the columns of ``cls``.

    Raises:
        DataError: The file is missing, unreadable or lacks a column.
    """
    table = read_table(path)
    names = clean_schema(cls.KIND).names
    require_columns(path, cls.KIND, names, table.column_names)
    return plain_table(path, cls.KIND, table.select(names))


def require_columns(path: Path, kind: str, names: Sequence[str], present: Sequence[str]) -> None:
    """Raise ``DataError`` where a clean file lacks a column."""
    missing = [name for name in names if name not in present]
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(missing)}: it is not a clean file of {kind}; run the stage validate again"
        )


def columns_of(table: pa.Table) -> dict[str, list[Any]]:
    """Return the values of each column of raw rows, prompts as lists of messages."""
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    if "prompt" in columns:
        prompts = []
        for messages in columns["prompt"]:
            prompts.append([Message(turn["role"], turn["content"]) for turn in messages])
        columns["prompt"] = prompts
    return columns


def rows_of_table(table: pa.Table, cls: type[Row]) -> list[Row]:
    """Make the rows of an arrow table dataclasses of type ``cls``."""
    names = [column.name for column in fields(cls)]
    columns = columns_of(table.select(names))
    return [cls(*values) for values in zip(*columns.values(), strict=True)]


# Columns of a record that hold the prompt itself.
OF_THE_PROMPT = frozenset({"prompt", "messages", "system"})


def columns_of_records(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of records other than the prompt, None where a record lacks one."""
    columns: dict[str, list[Any]] = {}
    listed = list(records)
    for record in listed:
        for name in record:
            if name not in OF_THE_PROMPT and str(name) not in columns:
                columns[str(name)] = [each.get(name) for each in listed]
    return columns


def columns_of_prompts(prompts: Iterable[Prompt]) -> dict[str, list[Any]]:
    """Return the columns that the records of prompts have beside these."""
    records = [json.loads(row.columns or "{}") for row in prompts]
    return columns_of_records(records)


def as_dict(row: Preference | Demonstration | Prompt | PretrainText) -> dict[str, Any]:
    """Return a row as a plain dictionary, its messages too."""
    values = dict(vars(row))
    if "prompt" in values:
        values["prompt"] = [dict(vars(message)) for message in values["prompt"]]
    return values


PART_ROWS = 1024


def read_row_table(path: Path, cls: type[Row]) -> TableRows[Row]:
    """Read a clean file as rows that are made when they are asked for.

    As an Arrow row each takes little more than its texts.

    Raises:
        DataError: It is missing, unreadable or of another kind.
    """
    table = read_kind(path, cls)
    count = table.num_rows
    part = min(PART_ROWS, rows_within(CHUNK_BYTES, count, table.nbytes))

    def rows(numbers: npt.NDArray[np.int64]) -> list[Row]:
        return rows_of_table(table.take(numbers), cls)

    return TableRows(np.arange(count), rows, part)


SPLITS = ("train", "validation", "test")


class PairUser(StrEnum):
    """The folder with the training and validation pairs of one of the three reward models."""

    REWARD = "preferences"
    REFEREE = "preferences_referee"
    JUDGE = "preferences_judge"


def unit_hash(*parts: object) -> float:
    """Return a number in [0, 1) from the sha256 of the parts joined by ``|``."""
    text = "|".join(map(str, parts))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(group: str, seed: int, config: SplitConfig) -> str:
    """Return ``train``, ``validation`` or ``test``, by seed, group and shares alone."""
    position = unit_hash("split", seed, group)
    if position < config.test:
        return "test"
    return "validation" if position < config.test + config.validation else "train"


def pair_user_of(group: str, seed: int, config: SplitConfig) -> PairUser:
    """Return which model the pairs of a train or validation group belong to.

    The judge's are drawn first.
    """
    if unit_hash("judge", seed, group) < config.judge:
        return PairUser.JUDGE
    if unit_hash("referee", seed, group) < config.referee:
        return PairUser.REFEREE
    return PairUser.REWARD


def assign(groups: Iterable[str], seed: int, config: SplitConfig) -> list[str]:
    """Return the split of each group in order; each distinct group is hashed once."""
    known: dict[str, str] = {}
    splits = []
    for group in groups:
        if group not in known:
            known[group] = split_of(group, seed, config)
        splits.append(known[group])
    return splits

"""Rows as the columns that expectations are about: texts that people can read, and numbers taken of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.data.schema import CONTENT_FIELDS, ROLES
from rlhf_core.data.tables import mapped_table
from rlhf_core.data.text import comparable, has_visible_text

LABELS = ("category", "source", "group")
CONTRADICTED_BY = "contradicted_by"
DIGEST_BYTES = 16
DIGEST = pa.binary(DIGEST_BYTES)
# An array of ordinary strings can hold only 2 GiB, which the texts of a column may exceed.
TEXT = pa.large_string()
PROMPT_COLUMNS = {
    "prompt": TEXT,
    "roles": TEXT,
    "turns": pa.int64(),
    "prompt_chars": pa.int64(),
    "blank_turns": pa.int64(),
    "last_turn": TEXT,
}


def column_schema(kind: str) -> pa.Schema:
    """Return the columns of a kind that are taken from its rows.

    ``prompt`` is the dialogue as text and ``roles`` who speaks, ``system user assistant user``; ``blank_turns`` counts
    turns of the user or the assistant without visible text, and a prompt without turns as one.
    """
    prompt = PROMPT_COLUMNS if kind != "pretrain" else {}
    margin = {"margin": pa.float64()} if kind == "preferences" else {}
    texts = dict.fromkeys(CONTENT_FIELDS[kind], TEXT)
    return pa.schema({"id": TEXT, **prompt, **texts, **margin, **dict.fromkeys(LABELS, TEXT)})


def column_names(kind: str) -> list[str]:
    """Return what an expectation may be about, beside rules about the whole set."""
    return [*column_schema(kind).names, *([CONTRADICTED_BY] if kind == "preferences" else [])]


def read_columns(kind: str, tables: Iterable[pa.Table], file: Path) -> tuple[pd.DataFrame, pa.Table]:
    """Return the columns of rows that arrive in parts, and hashes of each row: see :func:`_digests`.

    The texts stay in ``file``, which is mapped into memory. Rows are compared with each other by hashes, so that a part
    is not needed after it was read. ``contradicted_by`` is the id of a pair that is labelled the other way round.
    """
    digests: list[pa.Table] = []

    def columns() -> Iterator[pa.Table]:
        for table in tables:
            part = _columns(kind, table)
            digests.append(_digests(kind, part))
            yield part

    table = mapped_table(file, column_schema(kind), columns())
    hashed = pa.concat_tables(digests)
    frame = table.to_pandas(types_mapper={pa.float64(): pd.ArrowDtype(pa.float64())}.get)
    if kind == "preferences":
        other = pc.index_in(hashed.column("swapped"), value_set=hashed.column("labelled").combine_chunks())
        # Of a pair with equal replies the swapped one is the pair itself.
        equal = pc.equal(hashed.column("swapped"), hashed.column("labelled"))
        other = pc.if_else(equal, pa.scalar(None, pa.int32()), other)
        frame[CONTRADICTED_BY] = pd.Series(table.column("id").take(other).to_pandas(), dtype="str")
    return frame, hashed


def copies(contents: pa.ChunkedArray, accepted: npt.NDArray[np.bool_]) -> dict[int, int]:
    """Return the rows that have the same texts as another one, each with the number of that row.

    The first row of its texts that is ``accepted`` is no copy: what a refused row repeats is not lost.
    """
    hashes = contents.combine_chunks()
    original_of: dict[int, int] = {}
    for considered in (np.arange(len(hashes)), np.flatnonzero(accepted)):
        values = hashes.take(pa.array(considered))
        first = considered[pc.index_in(values, value_set=values).to_numpy()]
        for row in considered[first == considered].tolist():
            original_of.pop(row, None)
        repeated = first != considered
        original_of |= dict(zip(considered[repeated].tolist(), first[repeated].tolist(), strict=True))
    return original_of


def label_agreement(hashes: pa.Table, margins: Iterable[float | None]) -> dict[str, float]:
    """Count the labels of every pair among all rows that were read, refused ones too.

    White space and invisible characters do not count. Exact copies, of one margin too, are one label: what repeats a
    row is no second annotator.

    Args:
        hashes: Of the ``content`` of each row, and of its pair as it is ``labelled`` and ``swapped``.
        margins: Of each row.

    Returns:
        ``repeated_pairs``: pairs of replies to a prompt with two labels or more; ``contradicted_pairs``: those of them
        that are labelled both ways; ``label_agreement``: the share of their labels that say what most labels of the
        pair say, half of a tie. The last is not there where no pair repeats.
    """
    labels: dict[bytes, list[int]] = {}
    seen: set[int] = set()
    columns = [hashes.column(name).to_pylist() for name in ("content", "labelled", "swapped")]
    for content, labelled, swapped, margin in zip(*columns, margins, strict=True):
        copy = hash((content, margin))
        if copy not in seen and labelled != swapped:  # which are equal where the replies are
            labels.setdefault(min(labelled, swapped), [0, 0])[labelled < swapped] += 1
        seen.add(copy)
    repeated = [votes for votes in labels.values() if sum(votes) > 1]
    counts = {
        "repeated_pairs": float(len(repeated)),
        "contradicted_pairs": float(sum(min(votes) > 0 for votes in repeated)),
    }
    return counts | ({"label_agreement": sum(map(max, repeated)) / sum(map(sum, repeated))} if repeated else {})


def _columns(kind: str, table: pa.Table) -> pa.Table:
    schema = column_schema(kind)
    columns = {name: table.column(name) for name in schema.names if name not in PROMPT_COLUMNS}
    if kind != "pretrain":
        prompts: list[list[dict[str, str | None]] | None] = table.column("prompt").to_pylist()
        turns = [[(t["role"] or "", t["content"] or "") for t in prompt or [] if t] for prompt in prompts]
        present = [prompt is not None for prompt in prompts]
        lists = {
            "prompt": ["\n\n".join(f"{role}: {content}" for role, content in prompt) for prompt in turns],
            "roles": [" ".join(role if role in ROLES else f"<{role}>" for role, _ in prompt) for prompt in turns],
            "turns": [len(prompt) for prompt in turns],
            "prompt_chars": [sum(len(content) for _, content in prompt) for prompt in turns],
            "blank_turns": [
                sum(role != "system" and not has_visible_text(content) for role, content in prompt) if prompt else 1
                for prompt in turns
            ],
            "last_turn": [prompt[-1][1] if prompt else "" for prompt in turns],
        }
        columns |= {name: pa.array(values, PROMPT_COLUMNS[name]) for name, values in lists.items()}
        columns["prompt"] = pc.if_else(pa.array(present), columns["prompt"], pa.scalar(None, TEXT))
    return pa.table([columns[name].cast(field.type) for name, field in zip(schema.names, schema, strict=True)], schema)


def _digests(kind: str, columns: pa.Table) -> pa.Table:
    """Return 128-bit hashes of the content of rows; of pairs also as they are labelled, and the other way round.

    For the label, texts that differ in white space or invisible characters alone count as equal. Two of a billion
    contents have the same hash with a probability of about 1e-21.
    """
    texts = (pc.fill_null(columns.column(name), "").to_pylist() for name in CONTENT_FIELDS[kind])
    contents = list(zip(*texts, strict=True))
    hashes = {"content": [_digest(map(str.encode, content)) for content in contents]}
    if kind == "preferences":
        parts = [[_digest([comparable(text).encode()]) for text in content] for content in contents]
        hashes["labelled"] = [_digest((prompt, chosen, rejected)) for prompt, chosen, rejected in parts]
        hashes["swapped"] = [_digest((prompt, rejected, chosen)) for prompt, chosen, rejected in parts]
    return pa.table({name: pa.array(values, DIGEST) for name, values in hashes.items()})


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()

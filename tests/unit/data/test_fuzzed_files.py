"""Whatever a file holds, reading ends with rows, a refusal with a reason, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.malformed.case import Row, arrow, lines, pairs, parquet, table_text
from unit.data.malformed.containers import PACK
from unit.data.reading import is_unmarked, records_of

from rlhf_core.config.data import PairChoice, ReadOptions
from rlhf_core.config.formats import FormatName
from rlhf_core.data.collection.rows import FileRows, read_records
from rlhf_core.data.row_counts import Record
from rlhf_core.data.schema import ROW_TYPES, arrow_schema
from rlhf_core.errors import DataError

SAMPLES = {
    path.stem: [json.loads(line) for line in path.read_text().splitlines()]
    for path in sorted((Path(__file__).parent / "samples").glob("*.jsonl"))
}
DIALOGUES: list[Row] = [
    {
        "prompt": [{"role": "user", "content": f"{n}?"}],
        "chosen": "yes",
        "rejected": None,
        "margin": 0.5,
    }
    for n in range(4)
]
WRITERS = {
    ".json": lambda rows: json.dumps(rows).encode(),
    ".jsonl": lambda rows: lines(*rows),
    ".ndjson": lambda rows: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
    ".csv": table_text,
    ".tsv": lambda rows: table_text(rows, "\t"),
    ".parquet": parquet,
    ".arrow": arrow,
    "-stream.arrow": lambda rows: arrow(rows, stream=True, batch=2),
}
PACKED = PACK | {"": lambda content: content}
GOOD = {f"x{suffix}": write(pairs("good", 5)) for suffix, write in WRITERS.items()}
GOOD |= {f"x.jsonl{suffix}": pack(GOOD["x.jsonl"]) for suffix, pack in PACK.items()}
GOOD |= {
    f"nested{suffix}": WRITERS[suffix](DIALOGUES)
    for suffix in (".parquet", ".arrow", "-stream.arrow")
}
GOOD |= {"plain.parquet": parquet(pairs("good", 5), compression="none", use_dictionary=False)}
NAMES = st.sampled_from([f"x{suffix}{packed}" for suffix in WRITERS for packed in ("", *PACK)])
# A share of the file where something happens, what is done there, and the bytes that it is done
# with.
EDITS = st.tuples(
    st.floats(0, 1),
    st.sampled_from(["replace", "delete", "insert", "cut"]),
    st.binary(min_size=1, max_size=8),
)
TEXTS = st.text(max_size=12).filter(is_unmarked) | st.sampled_from(
    ['"', "\r\n", "\n", "\r", "\t", ",", "\0", "\ufeff", "\u2028\x85", " a ", "😀", "<", "["]
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)


def require_answer(name: str, content: bytes) -> None:
    """Read a file, and check that it gives rows that can be stored, or an error of ours."""
    try:
        read = read_records(records_of(name, content), "preferences", name)
    except DataError as error:
        assert str(error).startswith(name) and str(error).encode()
        return
    require_accounted(read, "preferences")


def require_accounted(read: FileRows, kind: str) -> None:
    """Check that rows, refusals and dropped records add up, and that all of them can be stored."""
    assert all(
        row.position >= 1 and row.reason.encode() and row.row.encode() for row in read.refused
    )
    written = read.counts.records + read.counts.expanded
    assert written == len(read.rows) + len(read.refused) + read.counts.dropped.total()
    assert pa.Table.from_pylist(read.rows, arrow_schema(kind)).num_rows == len(read.rows)


@given(name=NAMES, content=st.binary(max_size=200), compressed=st.booleans())
def test_any_bytes_are_read_or_refused(name: str, content: bytes, compressed: bool) -> None:
    pack = PACK.get(Path(name).suffix)
    require_answer(name, pack(content) if pack and compressed else content)


@pytest.mark.slow
@given(name=st.sampled_from(sorted(GOOD)), edits=st.lists(EDITS, min_size=1, max_size=4))
@settings(max_examples=300)
@example("x-stream.arrow", [(0.55, "replace", b"\xff\xff\xff\x7f")])
@example("nested-stream.arrow", [(0.0, "replace", b"\0\0\0\t")])
def test_a_damaged_file_is_read_or_refused(
    name: str, edits: list[tuple[float, str, bytes]]
) -> None:
    content = bytearray(GOOD[name])
    for share, action, new in edits:
        start = round(share * len(content))
        if action == "cut":
            del content[start:]
        else:
            content[start : start + (0 if action == "insert" else len(new))] = (
                b"" if action == "delete" else new
            )
    require_answer(name, bytes(content))


@given(
    rows=st.lists(
        st.fixed_dictionaries(dict.fromkeys(("prompt", "chosen", "rejected"), TEXTS)),
        min_size=1,
        max_size=5,
    ),
    suffix=st.sampled_from(sorted(WRITERS)),
    packed=st.sampled_from(sorted(PACKED)),
)
def test_what_is_written_is_read_back(rows: list[Row], suffix: str, packed: str) -> None:
    name = f"x{suffix}{packed}"
    records = records_of(name, PACKED[packed](WRITERS[suffix](rows)))
    assert [(record.value, record.problem) for record in records] == [(row, "") for row in rows]
    read = read_records(records, "preferences", name, options=ReadOptions(format="standard"))
    assert (len(read.rows), read.refused) == (len(rows), [])
    texts = [(row["prompt"], row["chosen"], row["rejected"]) for row in read.rows]
    assert texts == [
        ([{"role": "user", "content": r["prompt"]}], r["chosen"], r["rejected"]) for r in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
@given(data=st.data())
@settings(max_examples=15)
def test_a_published_record_with_another_value_is_read_or_refused(
    sample: str, data: st.DataObject
) -> None:
    rows = [dict(row) if isinstance(row, dict) else row for row in SAMPLES[sample]]
    odd = data.draw(st.integers(0, len(rows) - 1))
    if isinstance(rows[odd], dict):
        rows[odd] = changed(rows[odd], data)
    kind = data.draw(st.sampled_from(sorted(ROW_TYPES)))
    dimension = "agreed" if sample == "pku-saferlhf" and kind != "prompts" else None
    options = ReadOptions(dimension=dimension)
    as_written, changed_records = (
        [Record(position, row) for position, row in enumerate(listed, 1)]
        for listed in (SAMPLES[sample], rows)
    )
    try:
        read = read_records(changed_records, kind, "x.jsonl", options=options)
    except DataError as error:
        assert str(error).startswith("x.jsonl") and str(error).encode()
        return
    require_accounted(read, kind)
    refused = read_records(as_written, kind, "x.jsonl", options=options).refused
    allowed = {odd + 1, *(row.position for row in refused)}
    if sample == "oasst-messages":  # the replies to a message go with it
        allowed |= set(range(1, len(rows) + 1))
    assert {row.position for row in read.refused} <= allowed


def changed(record: Row, data: st.DataObject) -> Row:
    """Return the record with another value somewhere in it, or without a key."""
    key = data.draw(st.sampled_from(sorted(record)))
    inner = record[key]
    if (
        isinstance(inner, list)
        and inner
        and isinstance(inner[0], dict)
        and data.draw(st.booleans())
    ):
        return record | {key: [changed(inner[0], data), *inner[1:]]}
    if isinstance(inner, dict) and inner and data.draw(st.booleans()):
        return record | {key: changed(inner, data)}
    if data.draw(st.integers(0, 4)) == 0:
        return {name: value for name, value in record.items() if name != key}
    return record | {key: data.draw(JSON_VALUES)}


TRANSCRIPTS = ["\n\nHuman: a\n\nAssistant: b", "\n\nAssistant:", "Human: a\n\nAssistant: b"]
WORDS = st.text(max_size=8) | st.sampled_from(["", "\ud800", "\u200b", "user", "gpt", *TRANSCRIPTS])
NUMBERS = (
    st.integers() | st.floats() | st.booleans() | st.none() | st.sampled_from([10**400, 10**5000])
)
TURNS = st.dictionaries(
    st.sampled_from(
        ["role", "from", "content", "value", "tool_calls", "answer", "rank", "response", "text"]
    ),
    WORDS | NUMBERS,
    max_size=3,
)
KEYS = [
    *(
        "prompt",
        "chosen",
        "rejected",
        "margin",
        "label",
        "kto_tag",
        "conversations",
        "messages",
        "instruction",
    ),
    *("input", "output", "reply", "response", "history", "system", "text", "source", "category"),
    *(
        "response_0",
        "response_1",
        "better_response_id",
        "safer_response_id",
        "question",
        "score_chosen",
    ),
    *(
        "score_rejected",
        "completions",
        "answers",
        "responses",
        "scores",
        "ranks",
        "message_tree_id",
    ),
]
VALUES = (
    WORDS
    | NUMBERS
    | TURNS
    | st.lists(WORDS | TURNS | st.lists(WORDS | NUMBERS, max_size=3), max_size=3)
)
RECORDS = (
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)
    | st.lists(WORDS, max_size=3)
    | VALUES
)


@pytest.mark.parametrize("kind", ROW_TYPES)
@given(
    values=st.lists(RECORDS, min_size=1, max_size=4),
    name=st.none() | st.sampled_from(get_args(FormatName)),
    pairs=st.sampled_from(get_args(PairChoice)),
)
def test_any_record_is_read_or_refused(
    kind: str, values: list[Any], name: str | None, pairs: str
) -> None:
    records = [Record(position, value) for position, value in enumerate(values, 1)]
    options = ReadOptions(
        format=name, dimension="agreed" if name == "pku-saferlhf" else None, pairs=pairs
    )
    try:
        result = read_records(records, kind, "x.jsonl", options=options)
    except DataError as error:
        assert str(error).startswith("x.jsonl")
        return
    used = {*result.positions, *(row.position for row in result.refused)}
    assert len(set(result.positions)) + len(result.refused) + result.counts.dropped.total() == len(
        records
    )
    assert len(used) + result.counts.dropped.total() == len(records)
    require_accounted(result, kind)

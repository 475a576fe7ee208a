"""No record crashes a reader: each becomes a row or a refusal with a reason, and what becomes of it can be written."""

from __future__ import annotations

from typing import Any, get_args

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.data import FormatName, PairChoice, ReadOptions
from rlhf_core.data.collection.rows import read_records
from rlhf_core.data.readers.content import Record
from rlhf_core.data.schema import ROW_TYPES, arrow_schema
from rlhf_core.errors import DataError

TEXTS = st.text(max_size=8) | st.sampled_from(
    [
        "",
        "\n\nHuman: a\n\nAssistant: b",
        "\n\nAssistant:",
        "Human: a\n\nAssistant: b",
        "\ud800",
        "\u200b",
        "user",
        "gpt",
    ]
)
NUMBERS = st.integers() | st.floats() | st.booleans() | st.none() | st.sampled_from([10**400, 10**5000])
TURNS = st.dictionaries(
    st.sampled_from(["role", "from", "content", "value", "tool_calls", "answer", "rank", "response", "text"]),
    TEXTS | NUMBERS,
    max_size=3,
)
KEYS = [
    *("prompt", "chosen", "rejected", "margin", "label", "kto_tag", "conversations", "messages", "instruction"),
    *("input", "output", "reply", "response", "history", "system", "text", "source", "category"),
    *("response_0", "response_1", "better_response_id", "safer_response_id", "question", "score_chosen"),
    *("score_rejected", "completions", "answers", "responses", "scores", "ranks", "message_tree_id"),
]
VALUES = TEXTS | NUMBERS | TURNS | st.lists(TEXTS | TURNS | st.lists(TEXTS | NUMBERS, max_size=3), max_size=3)
RECORDS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6) | st.lists(TEXTS, max_size=3) | VALUES


@pytest.mark.parametrize("kind", ROW_TYPES)
@given(
    values=st.lists(RECORDS, min_size=1, max_size=4),
    name=st.none() | st.sampled_from(get_args(FormatName)),
    pairs=st.sampled_from(get_args(PairChoice)),
)
def test_any_record_is_read_or_refused(kind: str, values: list[Any], name: str | None, pairs: str) -> None:
    records = [Record(position, value) for position, value in enumerate(values, 1)]
    options = ReadOptions(format=name, dimension="agreed" if name == "pku-saferlhf" else None, pairs=pairs)
    try:
        result = read_records(records, kind, "x.jsonl", "", options=options)
    except DataError as error:
        assert str(error).startswith("x.jsonl")
        return
    used = {*result.positions, *(row.position for row in result.refused)}
    assert len(set(result.positions)) + len(result.refused) + result.counts.dropped.total() == len(records)
    assert len(used) + result.counts.dropped.total() == len(records)
    assert (
        len(records) + result.counts.expanded == len(result.rows) + len(result.refused) + result.counts.dropped.total()
    )
    assert all(row.reason and row.row.encode() for row in result.refused)
    assert pa.Table.from_pylist(result.rows, arrow_schema(kind)).num_rows == len(result.rows)

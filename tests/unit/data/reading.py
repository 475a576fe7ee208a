"""Read the content of a data file in tests, and write a record of each format of pairs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.collection.rows import FileRows, read_records
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.row_counts import Record


def read(kind: str, *values: Any, **options: Any) -> FileRows:
    """Read the records of a file as rows of a kind."""
    records = [Record(number, value) for number, value in enumerate(values, 1)]
    return read_records(records, kind, "x.jsonl", options=ReadOptions(**options))


def records_of(name: str, content: bytes) -> list[Record]:
    """Return the records of a file of that name and content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "content"
        path.write_bytes(content)
        return list(stream_records(path, name=name))


def is_unmarked(text: str) -> bool:
    """Whether a drawn text holds no marker or placeholder.

    Hypothesis also draws constants of the code.
    """
    return not {"<", "["} & {*text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# A record of each format, of a prompt, its better reply and its worse one.
PAIR_FORMATS: dict[str, Callable[[str, str, str], Any]] = {
    "standard": lambda q, a, b: {"prompt": q, "chosen": a, "rejected": b},
    "conversational": lambda q, a, b: {
        "prompt": [user(q)],
        "chosen": [said(a)],
        "rejected": [said(b)],
    },
    "conversational-implicit": lambda q, a, b: {
        "chosen": [user(q), said(a)],
        "rejected": [user(q), said(b)],
    },
    "hh-rlhf": lambda q, a, b: {
        "chosen": f"\n\nHuman: {q}\n\nAssistant: {a}",
        "rejected": f"\n\nHuman: {q}\n\nAssistant: {b}",
    },
    "alpaca-ranking": lambda q, a, b: {"instruction": q, "input": "", "chosen": a, "rejected": b},
    "pku-saferlhf": lambda q, a, b: {
        "prompt": q,
        "response_0": a,
        "response_1": b,
        "better_response_id": 0,
        "safer_response_id": 0,
    },
    "helpsteer2-preference": lambda q, a, b: {
        "prompt": q,
        "response_1": b,
        "response_2": a,
        "preference_strength": 2,
    },
    "helpsteer3-preference": lambda q, a, b: {
        "context": [user(q)],
        "response1": a,
        "response2": b,
        "overall_preference": -1,
    },
    "shp": lambda q, a, b: {"history": q, "human_ref_A": b, "human_ref_B": a, "labels": 0},
    "orca-dpo": lambda q, a, b: {"question": q, "chosen": a, "rejected": b},
    "sharegpt-ranking": lambda q, a, b: {
        "conversations": [{"from": "human", "value": q}],
        "chosen": {"from": "gpt", "value": a},
        "rejected": {"from": "gpt", "value": b},
    },
    "ultrafeedback-ratings": lambda q, a, b: {
        "instruction": q,
        "chosen_response": a,
        "rejected_response": b,
    },
    "ultrafeedback": lambda q, a, b: {
        "instruction": q,
        "completions": [{"response": b, "overall_score": 1}, {"response": a, "overall_score": 2}],
    },
    "nectar": lambda q, a, b: {
        "prompt": q,
        "answers": [{"answer": b, "rank": 2}, {"answer": a, "rank": 1}],
    },
    "ranking": lambda q, a, b: {"prompt": q, "responses": [b, a], "scores": [0.5, 1]},
    "oasst-trees": lambda q, a, b: {
        "message_tree_id": "t",
        "prompt": {
            "role": "prompter",
            "text": q,
            "replies": [
                {"role": "assistant", "text": b, "rank": 1},
                {"role": "assistant", "text": a, "rank": 0},
            ],
        },
    },
    "turn-list-pair": lambda q, a, b: {"chosen": [q, a], "rejected": [q, b]},
}

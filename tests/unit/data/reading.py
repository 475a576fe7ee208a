"""Read the content of a data file in tests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.collection.rows import FileRows, read_records
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.stream import stream_records


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
    """Whether a drawn text holds no marker or placeholder: Hypothesis draws the constants of the code too."""
    return not {"<", "["} & {*text}

"""Read the content of a data file in tests."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.stream import stream_records


def records_of(name: str, content: bytes) -> list[Record]:
    """Return the records of a file of that name and content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "content"
        path.write_bytes(content)
        return list(stream_records(path, name=name))

"""Every container holds the same rows, compressed or not, on disk or at a URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from unit.data.malformed.case import arrow, parquet, table_text
from unit.data.malformed.compressed import PACK
from unit.data.reading import records_of

from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.inspection.describe import as_text, describe_sources
from rlhf_core.errors import DataError
from rlhf_core.fingerprint import write_sources

ROWS = [{"prompt": f"Q\t{i}?\n", "chosen": '"a", b', "rejected": "é\u2028 "} for i in range(3)]


CONTENTS = {
    "x.json": json.dumps(ROWS).encode(),
    "x.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode(),
    "x.csv": table_text(ROWS),
    "x.tsv": table_text(ROWS, "\t"),
    "x.parquet": parquet(ROWS),
    "x.arrow": arrow(ROWS),
    "stream.arrow": arrow(ROWS, stream=True),
}


@pytest.mark.parametrize("suffix", ["", *PACK])
@pytest.mark.parametrize("name", CONTENTS)
def test_rows_are_read_back_as_they_were_written(name: str, suffix: str) -> None:
    records = records_of(name + suffix, PACK.get(suffix, bytes)(CONTENTS[name]))
    assert [(record.value, record.problem) for record in records] == [(row, "") for row in ROWS]


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/pairs/a.jsonl": CONTENTS["x.jsonl"], "/pairs/b.csv.zst": PACK[".zst"](CONTENTS["x.csv"])})
    yield filesystem
    filesystem.rm("/pairs", recursive=True)


def test_a_url_is_read_like_a_file(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    results = list(read_sources(["memory://pairs/a.jsonl", "memory://pairs/*"], "preferences", tmp_path))
    assert [result.counts.source for result in results] == ["memory://pairs/a.jsonl", "memory:///pairs/b.csv.zst"]
    assert [len(result.rows) for result in results] == [3, 3] and all(
        len(result.counts.sha256) == 64 for result in results
    )
    assert results[0].rows[0]["prompt"][0]["content"] == ROWS[0]["prompt"]
    assert "rows     3 as preferences, of 3" in as_text(describe_sources(["memory://pairs/a.jsonl"], tmp_path))


def test_a_folder_at_a_url_stands_for_its_data(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    store.pipe({"/pairs/README.md": b"about", "/pairs/.cache/c.jsonl": b"{}", "/pairs/in/d.jsonl": CONTENTS["x.jsonl"]})
    results = list(read_sources(["memory://pairs"], "preferences", tmp_path))
    names = ["a.jsonl", "b.csv.zst", "in/d.jsonl"]
    assert [result.counts.source for result in results] == [f"memory:///pairs/{name}" for name in names]
    store.pipe({"/bare/README.md": b"about"})
    with pytest.raises(DataError, match="memory://bare is a folder that holds no file of data"):
        list(read_sources(["memory://bare"], "preferences", tmp_path))
    store.rm("/bare", recursive=True)


def test_a_url_that_holds_no_file_is_a_users_error(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    for url, message in [
        ("memory://pairs/c.jsonl", "no file matches 'memory://pairs/c.jsonl'"),
        ("memory://pairs/*.parquet", "no file matches"),
        ("memory://pair*", "memory://pair\\* matches folders only; correct"),
        ("nothing://pairs/a.jsonl", "nothing://pairs/a.jsonl cannot be opened: Protocol not known"),
        ("dir://pairs/a.jsonl", "cannot be opened: dir:// needs more than a URL"),
        ("http://127.0.0.1:1/a.jsonl", "cannot look up http://127.0.0.1:1/a.jsonl: Cannot connect to host"),
        ("http://127.0.0.1:1/a.jsonl", "; check the address, the network, and the access to it"),
    ]:
        with pytest.raises(DataError, match=message):
            list(read_sources([url], "preferences", tmp_path))


def test_a_changed_file_at_a_url_changes_the_fingerprint(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    def fingerprint() -> str:
        write_sources(tmp_path, ["memory://pairs/*.jsonl", "memory://gone/x.jsonl"])
        return (tmp_path / ".fingerprints/sources.txt").read_text()

    first = fingerprint()
    assert fingerprint() == first and "memory://gone/x.jsonl" in first
    store.pipe("/pairs/a.jsonl", CONTENTS["x.jsonl"] + b"\n")
    assert fingerprint() != first

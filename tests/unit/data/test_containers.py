"""Files at a URL are read like files on disk, and credentials in the URL are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner
from unit.data.malformed.case import table_text
from unit.data.malformed.containers import PACK

from rlhf_core.cli import app
from rlhf_core.config.data import CollectConfig, ValidateConfig
from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.errors import DataError
from rlhf_core.fingerprint.tracked_files import write_sources
from rlhf_core.storage.data_files import carries_credentials, expand_url, local_copy
from rlhf_extras.data_files.describe import as_text, describe_sources

ROWS = [{"prompt": f"Q\t{i}?\n", "chosen": '"a", b', "rejected": "é\u2028 "} for i in range(3)]


JSONL = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/pairs/a.jsonl": JSONL, "/pairs/b.csv.zst": PACK[".zst"](table_text(ROWS))})
    yield filesystem
    filesystem.rm("/pairs", recursive=True)


def test_a_url_is_read_like_a_file(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    results = list(
        read_sources(["memory://pairs/a.jsonl", "memory://pairs/*"], "preferences", tmp_path)
    )
    assert [result.counts.source for result in results] == [
        "memory://pairs/a.jsonl",
        "memory:///pairs/b.csv.zst",
    ]
    assert [len(result.rows) for result in results] == [3, 3] and all(
        len(result.counts.sha256) == 64 for result in results
    )
    assert results[0].rows[0]["prompt"][0]["content"] == ROWS[0]["prompt"]
    assert "rows     3 as preferences, of 3" in as_text(
        describe_sources(["memory://pairs/a.jsonl"], tmp_path)
    )


def test_a_folder_at_a_url_stands_for_its_data(
    store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    store.pipe(
        {"/pairs/README.md": b"about", "/pairs/.cache/c.jsonl": b"{}", "/pairs/in/d.jsonl": JSONL}
    )
    results = list(read_sources(["memory://pairs"], "preferences", tmp_path))
    names = ["a.jsonl", "b.csv.zst", "in/d.jsonl"]
    assert [result.counts.source for result in results] == [
        f"memory:///pairs/{name}" for name in names
    ]
    store.pipe({"/bare/README.md": b"about"})
    with pytest.raises(DataError, match="memory://bare is a folder that holds no file of data"):
        list(read_sources(["memory://bare"], "preferences", tmp_path))
    store.rm("/bare", recursive=True)


def test_a_url_that_holds_no_file_is_a_users_error(
    store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    for url, message in [
        ("memory://pairs/c.jsonl", "no file matches 'memory://pairs/c.jsonl'"),
        ("memory://pairs/*.parquet", "no file matches"),
        ("memory://pair*", "memory://pair\\* matches folders only; correct"),
        ("nothing://pairs/a.jsonl", "nothing://pairs/a.jsonl cannot be opened: Protocol not known"),
        ("dir://pairs/a.jsonl", "cannot be opened: dir:// needs more than a URL"),
        (
            "http://127.0.0.1:1/a.jsonl",
            "cannot look up http://127.0.0.1:1/a.jsonl: Cannot connect to host",
        ),
        ("http://127.0.0.1:1/a.jsonl", "; check the address, the network, and the access to it"),
    ]:
        with pytest.raises(DataError, match=message):
            list(read_sources([url], "preferences", tmp_path))


def test_a_changed_file_at_a_url_changes_the_fingerprint(
    store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    def fingerprint() -> str:
        write_sources(tmp_path, ["memory://pairs/*.jsonl", "memory://gone/x.jsonl"])
        return (tmp_path / ".fingerprints/sources.txt").read_text()

    first = fingerprint()
    assert fingerprint() == first and "memory://gone/x.jsonl" in first
    store.pipe("/pairs/a.jsonl", JSONL + b"\n")
    assert fingerprint() != first


HEADER = "prompt,chosen,rejected\n"
GOOD = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
BIG = "9" * 5000


def read(tmp_path: Path, name: str, content: str) -> FileRows:
    (tmp_path / name).write_text(content, newline="")
    (result,) = read_sources([name], "preferences", tmp_path)
    return result


@pytest.mark.parametrize(
    ("row", "reason", "kept"),
    [
        (f'{GOOD[:-1]}, "chosen": "d"}}', "the key 'chosen' occurs twice", ("b", "d")),
        (
            '{"prompt": [{"role": "user", "content": "a", "content": "z"}], "chosen": "b", "rejected": "c"}',
            "the key 'content' occurs twice",
            ("a", "z"),
        ),
        (f'{GOOD[:-1]}, "extra": [{{"n": -{BIG}}}]}}', "an integer of 5001 digits", (f"-{BIG}",)),
    ],
    ids=lambda value: value[-30:],
)
@pytest.mark.parametrize("layout", ["[{}, {}]", '{{"data": [{}, {}]}}', "{}\n{}\n"])
def test_a_row_that_json_cannot_hold_is_refused_and_keeps_all_values(
    layout: str, row: str, reason: str, kept: tuple[str, ...], tmp_path: Path
) -> None:
    result = read(
        tmp_path, "x.jsonl" if layout.endswith("\n") else "x.json", layout.format(GOOD, row)
    )
    (refused,) = result.refused
    assert (refused.position, refused.reason, len(result.rows)) == (2, reason, 1)
    assert all(f'"{text}"' in json.dumps(json.loads(refused.row)) for text in kept)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("~nobody_of_this_name/x.jsonl", "~nobody_of_this_name"),
        ("x" * 5000, "File name too long"),
        ("a/" * 2500 + "*.jsonl", "File name too long"),
        ("x\0y.jsonl", "no file matches"),
        ("", "is empty"),
    ],
    ids=lambda text: text[:20],
)
def test_paths_that_cannot_be_are_users_errors(spec: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        list(read_sources([spec], "preferences", tmp_path))
    assert len(str(caught.value)) < 1000


def test_a_csv_field_over_the_limit_is_said_to_be_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.data.readers.csv_records.CSV_FIELD_LIMIT", 2**20)
    with pytest.raises(
        DataError, match=r"x\.csv, line 3: .*a field of more than 1 MiB begins there"
    ):
        read(tmp_path, "x.csv", f"{HEADER}a,b,c\nd,{'x' * (2**20 + 1)},e\n")


SECRET = "hunter2"
WITH_SECRET = (
    f"https://user:{SECRET}@localhost:1/x.jsonl",
    f"https://{SECRET}@localhost:1/x.jsonl",
    f"https://localhost:1/x.jsonl?v=1&access_token={SECRET}",
    f"https://localhost:1/x.jsonl?X-Amz-Credential=a&X-Amz-Signature={SECRET}",
    f"https://localhost:1/x.jsonl?sp=r&sig={SECRET}",
    f"s3://key:{SECRET}@bucket/x.jsonl",
)


@pytest.mark.parametrize("url", WITH_SECRET)
def test_credentials_are_refused_and_not_repeated(url: str) -> None:
    errors: list[str] = []
    for call in (lambda: expand_url(url, ""), lambda: local_copy(url).__enter__()):
        with pytest.raises(DataError) as refused:
            call()
        errors.append(str(refused.value))
    for config in (
        lambda: CollectConfig(source="files", files={"preferences": [url]}),  # type: ignore[arg-type]
        lambda: ValidateConfig(evaluation_files=({"path": url},)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValidationError) as wrong:
            config()
        errors.append(wrong.value.errors()[0]["msg"])
    assert all("carries credentials" in error and SECRET not in error for error in errors)


@pytest.mark.parametrize("command", ["inspect", "validate", "convert"])
def test_commands_refuse_them(command: str) -> None:
    more = ["--to", "x.jsonl"] if command == "convert" else []
    result = CliRunner().invoke(app, ["data", command, WITH_SECRET[0], *more])
    assert (
        isinstance(result.exception, DataError)
        and SECRET not in f"{result.exception}{result.output}"
    )


@pytest.mark.parametrize(
    "url",
    [
        "hf://datasets/owner/name@main/x.jsonl",
        "abfs://container@account.dfs.core.windows.net/x.jsonl",
        "github://owner:repository@main/x.jsonl",
        "sftp://reader@host/x.jsonl",
        "https://host/x.jsonl?author=me&version=2",
        "https://[broken/x.jsonl",
    ],
)
def test_other_names_are_no_credentials(url: str) -> None:
    assert not carries_credentials(url)

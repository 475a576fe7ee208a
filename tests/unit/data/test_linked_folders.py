"""Sources: links and patterns that reach a file several ways, folders, and data sets of a hub."""

from __future__ import annotations

import errno
import glob
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import command_environment
from hub_stand_in import hub_stand_in

from rlhf_core.data.collection.sources import HubId, parse_hub_id, source_files
from rlhf_core.errors import DataError
from rlhf_core.fingerprint.tracked_files import write_sources
from rlhf_core.storage.data_files import expand

PAIR = {"prompt": "Q?", "chosen": "a", "rejected": "b"}


def test_of_paths_of_one_depth_the_first_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x.jsonl").write_text("{}")
    (tmp_path / "a").symlink_to(tmp_path / "b", target_is_directory=True)
    assert expand("*/x.jsonl", tmp_path) == [tmp_path / "a/x.jsonl"]


def test_loops_of_many_links_are_bounded(tmp_path: Path) -> None:
    """Twelve folders with links to their parent: paths that follow each once are 12 factorial."""
    for number in range(12):
        folder = tmp_path / f"d{number:02}"
        folder.mkdir()
        (folder / "x.jsonl").write_text(json.dumps(PAIR | {"prompt": f"{number}?"}) + "\n")
        (folder / "loop").symlink_to(tmp_path, target_is_directory=True)
    files = [tmp_path / f"d{number:02}/x.jsonl" for number in range(12)]
    assert (
        expand("**/*.jsonl", tmp_path)
        == expand("**/**/x.jsonl", tmp_path)
        == expand("**", tmp_path)
        == files
    )
    assert expand("**/d03/**/d07/*.jsonl", tmp_path) == [tmp_path / "d03/loop/d07/x.jsonl"]
    names = [file.name for file in source_files(["**/*.jsonl"], tmp_path)]
    assert names == [str(file.relative_to(tmp_path)) for file in files]
    write_sources(tmp_path, ["**/*.jsonl"])
    lines = (tmp_path / ".fingerprints/sources.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == names, (
        "DVC looks at the files that are collected"
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "**/*.jsonl",
        "**",
        "**/*",
        "*/**/x.jsonl",
        "**/a/*.jsonl",
        "**/b/**/*.jsonl",
        "**/.h/*.jsonl",
        "a/**",
        "**/**/x*",
    ],
)
def test_a_pattern_matches_the_files_that_glob_finds(tmp_path: Path, pattern: str) -> None:
    for name in (
        "a/x.jsonl",
        "a/b/x.jsonl",
        "a/b/c/y.jsonl",
        ".h/x.jsonl",
        "a/.h/z.jsonl",
        "x.jsonl",
        "c[1]/x.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a/b", target_is_directory=True)
    files = {Path(path).resolve() for path in glob.glob(str(tmp_path / pattern), recursive=True)}
    assert {path.resolve() for path in expand(pattern, tmp_path)} == {
        path for path in files if path.is_file()
    }
    assert len(expand(pattern, tmp_path)) == len({path for path in files if path.is_file()})


def test_a_folder_stands_for_its_data(tmp_path: Path) -> None:
    """Descriptions and hidden files are skipped; any other file is read, so that none is lost."""
    for name in (
        "a.jsonl",
        "in/b.csv",
        "in/.c.jsonl",
        ".git/d.jsonl",
        "README.md",
        "in/dataset_info.json",
        "LICENSE",
    ):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text(json.dumps(PAIR) + "\n")
    for spec in ("set", "set/", str(tmp_path / "set")):
        assert expand(spec, tmp_path) == [tmp_path / "set/a.jsonl", tmp_path / "set/in/b.csv"]
    write_sources(tmp_path, ["set"])
    lines = (tmp_path / ".fingerprints/sources.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["set", "set/a.jsonl", "set/in/b.csv"]
    (tmp_path / "set/more.jsonl.bz2").write_bytes(b"BZh9")
    assert tmp_path / "set/more.jsonl.bz2" in expand("set", tmp_path)
    (tmp_path / "set/gone.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"gone\.jsonl is no file that can be read"):
        expand("set", tmp_path)


def test_a_folder_without_data_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "set/in").mkdir(parents=True)
    (tmp_path / "set/README.md").write_text("about")
    with pytest.raises(DataError, match="the folder set holds no file of data; correct the path"):
        expand("set", tmp_path)
    with pytest.raises(DataError, match=r"s\* matches folders only; name one of them"):
        expand("s*", tmp_path)


def test_a_link_to_itself_does_not_hide_its_folder(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x.jsonl").write_text("{}")
    (tmp_path / "d/ring").symlink_to("ring")
    assert expand("d/**/*.jsonl", tmp_path) == [tmp_path / "d/x.jsonl"]
    with pytest.raises(DataError, match="d/ring is no file that can be read"):
        expand("d", tmp_path)


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open/x.jsonl").write_text("{}")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if "closed" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(
        "rlhf_core.storage.data_files.os.scandir", refusing
    )  # modes do not bind root
    with pytest.raises(DataError, match=r"Permission denied in .*closed"):
        expand("**/*.jsonl", tmp_path)


def test_a_pattern_leaves_out_no_folder_of_data(tmp_path: Path) -> None:
    """Spark writes a folder ``x.parquet`` for a table."""
    (tmp_path / "a.parquet").write_text("x")
    (tmp_path / "b.parquet").mkdir()
    (tmp_path / "b.parquet/part-0.parquet").write_text("x")
    with pytest.raises(
        DataError, match=r"b\.parquet is a folder, whose files the pattern leaves out"
    ):
        expand("*.parquet", tmp_path)
    both = [tmp_path / "a.parquet", tmp_path / "b.parquet/part-0.parquet"]
    assert expand("**/*.parquet", tmp_path) == expand("**", tmp_path) == both


OLD, NEW = "a" * 40, "b" * 40
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = b"""---
configs:
- config_name: easy
  data_files: [{split: train, path: easy.jsonl}, {split: test, path: test.jsonl}]
- config_name: hard
  data_files: [{split: train, path: hard.jsonl}]
---
"""
LOAD = """
import json, sys
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.errors import DataError
from pathlib import Path
for words in sys.argv[1:]:
    spec, _, limit = words.partition(" ")
    try:
        (read,) = read_sources([spec], "preferences", Path(), int(limit) if limit else None)
        print(json.dumps([len(read.rows), read.counts.unread, read.counts.revision, read.rows[0]["chosen"]]))
    except DataError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("hub:owner/name", HubId("owner/name")),
        ("hub:name", HubId("name")),
        ("hub:owner/name:test", HubId("owner/name", split="test")),
        ("hub:owner/name:train[:100]", HubId("owner/name", split="train[:100]")),
        ("hub:owner/name/easy", HubId("owner/name", "easy")),
        (f"hub:owner/name@{COMMIT}", HubId("owner/name", None, COMMIT)),
        ("hub:owner/name/easy@refs/pr/1:test", HubId("owner/name", "easy", "refs/pr/1", "test")),
    ],
)
def test_the_parts_of_a_hub_id(spec: str, parts: HubId) -> None:
    assert parse_hub_id(spec) == parts


@pytest.mark.parametrize(
    "spec", ["hub:", "hub:/name", "hub:a/b/c/d", "hub:a/b@", "hub:a/b@v1@v2", "hub:a b"]
)
def test_what_is_no_hub_id(spec: str) -> None:
    with pytest.raises(DataError, match="is not a hub id; write hub:owner/name"):
        parse_hub_id(spec)


def files(chosen: str) -> dict[str, bytes]:
    row = json.dumps({"prompt": "Q?", "chosen": chosen, "rejected": "b"}).encode() + b"\n"
    return {"README.md": CARD, "easy.jsonl": row * 5, "test.jsonl": row * 3, "hard.jsonl": row * 2}


def load(*specs: str, **environment: str) -> list[list[object] | str]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *specs],
        env={**command_environment(), **environment},
        cwd=environment["HF_HOME"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_configurations_and_revisions_of_a_hub(tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    with hub_stand_in({OLD: files("old"), NEW: files("new")}, {"main": NEW, "v1": OLD}) as hub:
        specs = [
            "hub:owner/name/easy",
            "hub:owner/name/easy@v1:test 2",
            f"hub:owner/name/hard@{OLD}",
        ]
        wrong = [
            "hub:owner/name/hard@v2",
            "hub:owner/name/soft",
            "hub:owner/name/easy:dev",
            "hub:owner/none",
        ]
        answers = load(*specs, *wrong, HF_ENDPOINT=hub.address, **home)
    # With a limit the rest is not read, and this data set does not say how long it is.
    assert answers[:3] == [[5, 0, NEW, "new"], [2, None, OLD, "old"], [2, 0, OLD, "old"]]
    for spec, answer in zip(wrong, answers[3:], strict=True):
        assert isinstance(answer, str) and answer.startswith(f"{spec}: cannot load the data set (")
    offline = [f"hub:owner/name/hard@{OLD}", f"hub:owner/name/easy@{OLD}", "hub:owner/name/easy@v1"]
    kept, other, unknown = load(*offline, **home | {"HF_HUB_OFFLINE": "1"})
    assert kept == [2, 0, OLD, "old"]
    assert f"the cached copy is of the commit {NEW}" in str(other)
    assert "name the commit itself: v1 cannot be looked up" in str(unknown)

"""DVC sees a change of every file that collect reads, whatever the file is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_core.data.collection.sources import read_sources
from rlhf_core.fingerprint.tracked_files import write_sources
from rlhf_core.storage.data_files import expand, spelled

ROW = '{"prompt": "Q?", "chosen": "a", "rejected": "%s"}\n'


def fingerprint(workspace: Path, spec: str) -> str:
    write_sources(workspace, [spec])
    return (workspace / ".fingerprints/sources.txt").read_text()


@pytest.mark.parametrize(
    ("file", "spec"),
    [
        ("plain.jsonl", "plain.jsonl"),
        ("[1] pairs.jsonl", "[1] pairs.jsonl"),
        ("a[b]/pairs.jsonl", "a[b]/pairs.jsonl"),
        ("a[b]/pairs.jsonl", "a[b]/*.jsonl"),
        ("~pairs.jsonl", "~pairs.jsonl"),
        ("~/pairs.jsonl", "./~/pairs.jsonl"),
        ("set/pairs.jsonl", "set"),
        ("home/pairs.jsonl", "~/pairs.jsonl"),
        ("home/x/pairs.jsonl", "~/x/*.jsonl"),
        ("deep/er/pairs.jsonl", "deep/**/*.jsonl"),
    ],
)
@pytest.mark.parametrize("folder", ["work", "work [2]"])
def test_what_collect_reads_is_what_the_fingerprint_hashes(
    folder: str, file: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / folder
    monkeypatch.setenv("HOME", str(workspace / "home"))
    path = workspace / file
    path.parent.mkdir(parents=True)
    path.write_text(ROW % "b")
    (before,) = read_sources([spec], "preferences", workspace)
    first = fingerprint(workspace, spec)
    path.write_text(ROW % "c")
    (after,) = read_sources([spec], "preferences", workspace)
    assert before.rows != after.rows
    assert fingerprint(workspace, spec) != first


def test_files_are_listed_by_path_and_a_missing_one_is_no_error(tmp_path: Path) -> None:
    for name in ("a/x.jsonl", "b/x.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(ROW % "b")
    lines = fingerprint(tmp_path, "*/x.jsonl").splitlines()
    assert [line.split()[0] for line in lines] == ["*/x.jsonl", "a/x.jsonl", "b/x.jsonl"]
    assert fingerprint(tmp_path, "gone.jsonl") == "gone.jsonl\n"


def test_paths_are_spelled_as_the_source_spells_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x.jsonl").write_text(ROW % "b")
    workspace = tmp_path / "work"
    workspace.mkdir()
    for spec, expected in (("../data/*", "../data/x.jsonl"), (f"{tmp_path}/data/*", f"{tmp_path}/data/x.jsonl")):
        (path,) = expand(spec, workspace)
        assert spelled(path, spec, workspace) == expected


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    """As of a copy that keeps times, or an editor that restores them."""
    path = tmp_path / "x.jsonl"
    path.write_text(ROW % "b")
    first, times = fingerprint(tmp_path, "x.jsonl"), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_text(ROW % "c")
    os.utime(path, ns=times)
    assert fingerprint(tmp_path, "x.jsonl") != first

"""A file that links or several patterns reach several ways is one file, named by its shortest path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.data.inspect import describe_sources
from rlhf_core.data.sources import source_files
from rlhf_core.file_patterns import expand

PAIR = {"prompt": "Q?", "chosen": "a", "rejected": "b"}


@pytest.fixture
def looped(tmp_path: Path) -> Path:
    """Two files in two folders, the first of which holds a link to their parent."""
    for name in ("d1", "d2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text(json.dumps(PAIR | {"prompt": name}) + "\n")
    (tmp_path / "d1/loop").symlink_to(tmp_path, target_is_directory=True)
    return tmp_path


def test_a_loop_of_links_gives_each_file_once(looped: Path) -> None:
    assert expand("**/*.jsonl", looped) == [looped / "d1/x.jsonl", looped / "d2/x.jsonl"]
    assert [file.name for file in source_files(["**/*.jsonl"], looped)] == ["d1/x.jsonl", "d2/x.jsonl"]


def test_inspect_describes_each_file_once(looped: Path) -> None:
    described = describe_sources(["**/*.jsonl", "d2/x.jsonl", "./d1/*.jsonl"], looped)
    assert [file.name for file in described.files] == [str(looped / "d1/x.jsonl"), str(looped / "d2/x.jsonl")]


def test_of_paths_of_one_depth_the_first_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x.jsonl").write_text("{}")
    (tmp_path / "a").symlink_to(tmp_path / "b", target_is_directory=True)
    assert expand("*/x.jsonl", tmp_path) == [tmp_path / "a/x.jsonl"]

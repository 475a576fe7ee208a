"""Whether source files differ from those that the last run has read, and what is announced of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from flows.pipeline.data_watch import ANNOUNCED, EVENT, find_new_data
from flows.workspace.folder import private_path
from rlhf_core.config.loading import load_params
from rlhf_core.data.collection.sources import collected_paths
from rlhf_core.fingerprint import write_sources

PAIR = '{"prompt": "p", "chosen": "a", "rejected": "b"}\n'


def finish_run(workspace: Path) -> None:
    """What a run leaves behind: the sources that `rlhf fingerprint` wrote down, and their hash in dvc.lock."""
    write_sources(workspace, collected_paths(load_params(workspace).collect, workspace))
    digest = hashlib.md5((workspace / ".fingerprints/sources.txt").read_bytes(), usedforsecurity=False).hexdigest()
    deps = f"[{{path: .fingerprints/sources.txt, md5: {digest}}}]"
    (workspace / "dvc.lock").write_text(f"stages: {{collect: {{deps: {deps}}}}}\n")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    files = "{preferences: [{path: 'my pairs.jsonl'}]}"
    (tmp_path / "params.yaml").write_text(f"seed: 1\ncollect: {{source: files, files: {files}}}\n")
    (tmp_path / "my pairs.jsonl").write_text(PAIR)
    return tmp_path


def test_nothing_is_new_before_the_first_run_and_right_after_one(workspace: Path) -> None:
    assert find_new_data(workspace) is None
    finish_run(workspace)
    assert find_new_data(workspace) is None


def test_annotations_and_changed_files_are_new_until_they_are_announced_or_read(workspace: Path) -> None:
    finish_run(workspace)
    (workspace / "data/annotations").mkdir(parents=True)
    (workspace / "data/annotations/first.jsonl").write_text(PAIR)
    (workspace / "my pairs.jsonl").write_text(PAIR * 2)
    change = find_new_data(workspace)
    assert change is not None and change.files == ["data/annotations/first.jsonl", "my pairs.jsonl"]
    request = change.as_request(workspace)
    assert request["event"] == EVENT and request["resource"]["rlhf.workspace"] == str(workspace)
    assert request["payload"]["count"] == 2 and request["id"] == change.as_request(workspace)["id"]
    private_path(workspace, ANNOUNCED).write_text(change.key)
    assert find_new_data(workspace) is None, "announced once: a run that fails over it is not repeated"
    (workspace / "data/annotations/second.jsonl").write_text(PAIR)
    again = find_new_data(workspace)
    assert again is not None and again.as_request(workspace)["id"] != request["id"]
    finish_run(workspace)
    assert find_new_data(workspace) is None, "a run has read it"
    (workspace / "data/annotations/second.jsonl").unlink()
    gone = find_new_data(workspace)
    assert gone is not None and gone.files == ["data/annotations/second.jsonl"]

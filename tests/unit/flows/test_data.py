"""Whether source files differ from those that the last run has read, and ``rlhf data diff``."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import command_environment
from typer.testing import CliRunner

from flows.cli import app
from flows.pipeline.data_watch import ANNOUNCED, EVENT, find_new_data
from flows.workspace import private_path
from rlhf_core.config.data import CollectConfig, FileSources
from rlhf_core.config.loading import load_params
from rlhf_core.data.collection.sources import collected_paths
from rlhf_core.errors import RlhfError
from rlhf_core.fingerprint.tracked_files import write_sources
from rlhf_core.stages.collect import collect
from rlhf_extras.data_files.revisions import check_out

PAIR = '{"prompt": "p", "chosen": "a", "rejected": "b"}\n'


def finish_run(watched: Path) -> None:
    """What a run leaves behind: the sources that `rlhf fingerprint` wrote down, and their hash in
    dvc.lock.
    """
    write_sources(watched, collected_paths(load_params(watched).collect, watched))
    digest = hashlib.md5(
        (watched / ".fingerprints/sources.txt").read_bytes(), usedforsecurity=False
    ).hexdigest()
    deps = f"[{{path: .fingerprints/sources.txt, md5: {digest}}}]"
    (watched / "dvc.lock").write_text(f"stages: {{collect: {{deps: {deps}}}}}\n")


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    files = "{preferences: [{path: 'my pairs.jsonl'}]}"
    (tmp_path / "params.yaml").write_text(f"seed: 1\ncollect: {{source: files, files: {files}}}\n")
    (tmp_path / "my pairs.jsonl").write_text(PAIR)
    return tmp_path


def test_nothing_is_new_before_the_first_run_and_right_after_one(watched: Path) -> None:
    assert find_new_data(watched) is None
    finish_run(watched)
    assert find_new_data(watched) is None


def test_annotations_and_changed_files_are_new_until_they_are_announced_or_read(
    watched: Path,
) -> None:
    finish_run(watched)
    (watched / "data/annotations").mkdir(parents=True)
    (watched / "data/annotations/first.jsonl").write_text(PAIR)
    (watched / "my pairs.jsonl").write_text(PAIR * 2)
    event = find_new_data(watched)
    assert event is not None
    assert event["payload"]["files"] == ["data/annotations/first.jsonl", "my pairs.jsonl"]
    assert event["event"] == EVENT and event["resource"]["rlhf.workspace"] == str(watched)
    same = find_new_data(watched)
    assert event["payload"]["count"] == 2 and same is not None and event["id"] == same["id"]
    private_path(watched, ANNOUNCED).write_text(event["id"])
    assert find_new_data(watched) is None, (
        "announced once: a run that fails over it is not repeated"
    )
    (watched / "data/annotations/second.jsonl").write_text(PAIR)
    again = find_new_data(watched)
    assert again is not None and again["id"] != event["id"]
    finish_run(watched)
    assert find_new_data(watched) is None, "a run has read it"
    (watched / "data/annotations/second.jsonl").unlink()
    gone = find_new_data(watched)
    assert gone is not None and gone["payload"]["files"] == ["data/annotations/second.jsonl"]


COMMIT = """
import subprocess, sys
from dvc.repo import Repo
message = sys.argv[1]
git = lambda *words: subprocess.run(["git", *words], check=True, capture_output=True)
if message == "first":
    git("init", "--quiet", "..")
    git("config", "user.email", "a@b.c")
    git("config", "user.name", "a")
    Repo.init(".", subdir=True).close()
with Repo(".") as repo:
    repo.add(["data/raw", "pairs.jsonl"])
git("add", "--all")
git("commit", "--quiet", "--message", message)
git("tag", message)
"""


def pairs(folder: Path, count: int, **changes: str) -> None:
    rows = [
        {"prompt": f"Q{i}?", "chosen": changes.get(f"Q{i}", "good"), "rejected": "bad"}
        for i in range(count)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def diff(*words: str) -> Any:
    return CliRunner().invoke(app, ["data", "diff", *words])


def counts(*words: str) -> dict[str, dict[str, int]]:
    names = ("unchanged", "added", "removed", "changed")
    value = json.loads(diff(*words, "--json").stdout)
    return {
        kind: {name: numbers[name] for name in names if numbers[name]}
        for kind, numbers in value.items()
    }


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace in a folder of a git repository, with two revisions."""
    folder = tmp_path / "my-run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("params.yaml", "dvc.yaml"):
        (folder / name).write_text("{}\n")
    config = CollectConfig(source="files", files=FileSources(preferences=("pairs.jsonl",)))
    for message, count in (("first", 5), ("second", 7)):
        pairs(folder, count, Q0=message)
        collect(config, folder, folder / "data/raw")
        subprocess.run(
            [sys.executable, "-c", COMMIT, message],
            check=True,
            env=command_environment(),
            cwd=folder,
        )
    return folder


@pytest.mark.slow
def test_revisions_of_data_that_dvc_keeps(workspace: Path) -> None:
    pairs(workspace, 6, Q0="second")
    assert counts("first", "second") == {
        "preferences": {"unchanged": 4, "added": 2, "changed": 1},
        "demonstrations": {"unchanged": 4, "added": 2, "changed": 1},
        "prompts": {"unchanged": 5, "added": 2},
        "pretrain": {"unchanged": 4, "added": 2, "changed": 1},
    }
    assert counts("second", "workspace", "pairs.jsonl") == {
        "preferences": {"unchanged": 6, "removed": 1}
    }
    with pytest.raises(
        RlhfError,
        match=r"cannot read other\.jsonl as of first .*is dvc\.lock, or the file, committed",
    ):
        check_out(workspace, "first", ["other.jsonl"], workspace / "out")
    assert list((workspace / "..").glob("*.jsonl")) == [], "nothing is written beside the workspace"
    with pytest.raises(RlhfError, match=r"\.\./\.\./x\.jsonl is not in the repository"):
        check_out(workspace, "first", ["../../x.jsonl"], workspace / "out")
    refused = diff("first", "third")
    assert f"third is neither a data file nor a revision of git in {workspace}" in str(
        refused.exception
    )


@pytest.mark.slow
def test_files_of_the_repository_beside_the_workspace(workspace: Path) -> None:
    """As ``rlhf init`` names them in a new folder of a repository that has the data."""
    pairs(workspace.parent, 2)
    subprocess.run(
        [sys.executable, "-c", COMMIT, "third"],
        check=True,
        env=command_environment(),
        cwd=workspace,
    )
    pairs(workspace.parent, 3, Q0="best")
    expected = {"preferences": {"unchanged": 1, "added": 1, "changed": 1}}
    assert counts("third", "workspace", "../pairs.jsonl") == expected
    assert "cannot read ../pairs.jsonl as of first" in str(
        diff("first", "third", "../pairs.jsonl").exception
    )


@pytest.mark.slow
def test_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs(tmp_path, 3)
    (tmp_path / "pairs.jsonl").rename("old.jsonl")
    pairs(tmp_path, 3, Q1="better")
    assert counts("old.jsonl", "pairs.jsonl") == {"preferences": {"unchanged": 2, "changed": 1}}
    done = diff("old.jsonl", "pairs.jsonl")
    assert done.exit_code == 0 and "chosen     better" in done.stdout
    assert "old.jsonl is one too many" in str(
        diff("old.jsonl", "pairs.jsonl", "old.jsonl").exception
    )
    for words in (("old.jsonl", "nowhere.jsonl"), ("nowhere.jsonl", "old.jsonl")):
        assert "old.jsonl is a file, but no file matches 'nowhere.jsonl'" in str(
            diff(*words).exception
        )
    assert "there is no workspace" in str(diff("v1", "v2").exception)


@pytest.mark.slow
def test_records_that_are_no_rows_are_counted(workspace: Path) -> None:
    refused, dropped = (
        '{"prompt": "Q?"}\n',
        '{"prompt": "D?", "chosen": "a", "rejected": "b", "margin": null, %s}\n',
    )
    tie = dropped % '"score_chosen": 1, "score_rejected": 1'
    Path("odd.jsonl").write_text(Path("pairs.jsonl").read_text() + refused + tie * 2)
    config = CollectConfig(source="files", files=FileSources(preferences=("odd.jsonl",)))
    collect(config, workspace, workspace / "data/raw")
    expected = {"before": {}, "after": {"refused": 1, "dropped": 2}}
    for words in (("pairs.jsonl", "odd.jsonl"), ("second", "workspace")):
        assert json.loads(diff(*words, "--json").stdout)["preferences"]["left_out"] == expected
        lines = diff(*words, "--kind", "preferences").stdout.splitlines()
        assert lines == [
            "preferences: 7 rows before, 7 after, all the same",
            "  refused     0 before, 1 after: not compared",
            "  dropped     0 before, 2 after: not compared",
        ]

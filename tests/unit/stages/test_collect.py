"""Collect writes four kinds from the world or from files, derives what is missing, and tells where
all came from.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from ranks import exit_code_of
from traced import missed

from rlhf_core.config.data import CollectConfig, DataSource, FileSources, WorldConfig
from rlhf_core.data.collection.sources import require_kept
from rlhf_core.data.schema import (
    Demonstration,
    Preference,
    PretrainText,
    Prompt,
    read_table,
    rows_of_table,
)
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.stages import collect
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.storage.files import sha256_file, sha256_tree
from rlhf_core.training.run_context import RunContext

WORLD = CollectConfig(world=WorldConfig(demonstrations=30, preferences=40, pretrain=20))


def run(config: CollectConfig, workspace: Path) -> tuple[Path, Mapping[str, Any]]:
    raw = workspace / "data" / "raw"
    return raw, collect.STAGE.run(
        config, Paths({}), Paths({"raw": raw}), RunContext(workspace / "work")
    )


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def from_files(workspace: Path, rows: list[Any], **more: Any) -> CollectConfig:
    workspace.mkdir(parents=True, exist_ok=True)
    (workspace / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return CollectConfig(source="files", files=FileSources(preferences=("pairs.jsonl",), **more))


def collect_with(spare: int, root: Path) -> None:
    """Collect with so many more files than are open; end as the stage does, and say what it says."""
    config = from_files(root, [pair("Q?", "a", "b")])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + spare, hard))
    try:
        run(config, root)
        said = ""
    except (RlhfError, OSError) as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    (root / "said.txt").write_text(said)


def test_as_many_open_files_as_may_be_leave_nothing_half_written(tmp_path: Path) -> None:
    refusals = 0
    for spare in (2, 3, 4, 6, 8, 40):
        root = tmp_path / str(spare)
        root.mkdir()
        assert exit_code_of(collect_with, spare, root) == 0
        said = (root / "said.txt").read_text()
        is_refused = bool(said)
        assert ("open files" in said) == is_refused, said
        left = sorted(path.name for path in (root / "data").glob("*"))
        assert left == ([] if is_refused else ["raw"])
        refusals += is_refused
    assert refusals > 2 and not is_refused


def test_world_gives_every_kind_and_is_repeatable(tmp_path: Path) -> None:
    raw, metrics = run(WORLD, tmp_path / "a")
    assert (
        metrics["preferences_rows"],
        metrics["demonstrations_rows"],
        metrics["pretrain_rows"],
    ) == (40, 30, 20)
    assert metrics["prompts_rows"] > 1000 and metrics["refused_rows"] == 0
    assert not (raw / "provenance.parquet").exists(), "the rows come from no file"
    pairs = rows_of_table(read_table(raw / "preferences/data.parquet"), Preference)
    assert all(
        p.chosen != p.rejected and p.prompt[-1].role == "user" and p.group and p.category
        for p in pairs
    )
    for kind, cls in (
        ("demonstrations", Demonstration),
        ("prompts", Prompt),
        ("pretrain", PretrainText),
    ):
        assert all(
            len(row.id) == 16 for row in rows_of_table(read_table(raw / kind / "data.parquet"), cls)
        )
    assert missed("collect", lambda: run(WORLD, tmp_path / "b")) == set(), (
        "what is executed counts in the fingerprint"
    )
    assert sha256_tree(tmp_path / "b/data/raw") == sha256_tree(raw)


def test_limit_bounds_every_kind(tmp_path: Path) -> None:
    _, metrics = run(WORLD.model_copy(update={"limit": 7}), tmp_path)
    assert {name: n for name, n in metrics.items() if name != "refused_rows"} == {
        f"{kind}_rows": 7.0 for kind in ("preferences", "demonstrations", "prompts", "pretrain")
    }


def test_missing_kinds_are_derived_without_copies(tmp_path: Path) -> None:
    rows = [pair("Q1?", "a", "b"), pair("Q1?", "a", "c"), pair("Q2?", "d", "e")]
    raw, _ = run(from_files(tmp_path, rows), tmp_path)
    demonstrations = rows_of_table(read_table(raw / "demonstrations/data.parquet"), Demonstration)
    about = [(d.prompt[0].content, d.reply, d.group) for d in demonstrations]
    assert about == [("Q1?", "a", "q1?"), ("Q2?", "d", "q2?")]
    prompts = rows_of_table(read_table(raw / "prompts/data.parquet"), Prompt)
    assert [p.prompt[0].content for p in prompts] == ["Q1?", "Q2?"]
    texts = rows_of_table(read_table(raw / "pretrain/data.parquet"), PretrainText)
    assert [(t.text, t.group) for t in texts] == [("Q1?\na", "q1?"), ("Q2?\nd", "q2?")]
    manifest = json.loads((raw / "manifest.json").read_text())
    assert {kind: about["derived_from"] for kind, about in manifest["kinds"].items()} == {
        "preferences": "",
        "demonstrations": "preferences",
        "prompts": "preferences, demonstrations",
        "pretrain": "demonstrations",
    }


def test_of_the_best_replies_of_a_ranking_the_first_is_imitated(tmp_path: Path) -> None:
    """So it is where the file is read as demonstrations."""
    rankings = [
        {"prompt": "Q1?", "responses": ["worse", "as good", "good", "bad"], "scores": [2, 3, 3, 1]},
        {"prompt": "Q2?", "responses": ["a", "b"], "scores": [1, 2]},
    ]
    derived, _ = run(from_files(tmp_path / "derived", rankings), tmp_path / "derived")
    read, _ = run(
        from_files(tmp_path / "read", rankings, demonstrations=("pairs.jsonl",)), tmp_path / "read"
    )
    for raw in (derived, read):
        rows = rows_of_table(read_table(raw / "demonstrations/data.parquet"), Demonstration)
        assert [row.reply for row in rows] == ["as good", "b"]
    assert len(rows_of_table(read_table(derived / "preferences/data.parquet"), Preference)) == 6


def test_manifest_and_refused_rows(tmp_path: Path) -> None:
    raw, metrics = run(from_files(tmp_path, [pair("Q?", "a", "b"), {"bad": 1}]), tmp_path)
    assert metrics["refused_rows"] == 1
    (refused,) = pq.read_table(raw / "refused.parquet").to_pylist()
    assert (refused["kind"], refused["source"], refused["position"]) == (
        "preferences",
        "pairs.jsonl",
        2,
    )
    assert json.loads(refused["row"]) == {"bad": 1} and "standard" in refused["reason"]
    about = json.loads((raw / "manifest.json").read_text())["kinds"]["preferences"]
    assert about["sha256"] == sha256_file(raw / "preferences/data.parquet")
    assert about["cut"] == 0 and metrics["cut_rows"] == 0
    digest = sha256_file(tmp_path / "pairs.jsonl")
    assert about["files"] == [
        {
            "source": "pairs.jsonl",
            "sha256": digest,
            "format": "standard",
            "records": 2,
            "rows": 1,
            "refused": 1,
        }
        | {"dropped": {}, "unused": {}, "noticed": {}, "expanded": 0, "cut": 0, "unread": 0}
        | {"revision": "", "weight": 1.0, "cap": None, "share": 1.0}
    ]


def test_a_failure_leaves_the_old_data_and_nothing_half_written(tmp_path: Path) -> None:
    raw, _ = run(from_files(tmp_path, [pair("Q?", "a", "b")]), tmp_path)
    before = sha256_tree(raw)
    with pytest.raises(DataError, match=r"no file matches 'gone.jsonl'"):
        run(CollectConfig(source="files", files=FileSources(preferences=("gone.jsonl",))), tmp_path)
    assert sha256_tree(raw) == before
    assert [path.name for path in raw.parent.iterdir()] == ["raw"]


def test_files_without_preferences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"collect\.files\.preferences is empty"):
        run(CollectConfig(source="files"), tmp_path)


@pytest.mark.parametrize(
    "spec",
    ["data/raw/mine.jsonl", "data/*/*.jsonl", "linked/mine.jsonl", "file://{}/data/raw/mine.jsonl"],
)
def test_a_source_that_the_stage_would_delete_is_refused(spec: str, tmp_path: Path) -> None:
    raw = tmp_path / "data/raw"
    raw.mkdir(parents=True)
    (raw / "mine.jsonl").write_text(json.dumps(pair("Q?", "a", "b")))
    (tmp_path / "linked").symlink_to(raw)
    config = CollectConfig(source="files", files=FileSources(preferences=(spec.format(tmp_path),)))
    with pytest.raises(DataError, match=r"mine\.jsonl lies in data/raw, which is replaced"):
        run(config, tmp_path)
    assert (raw / "mine.jsonl").exists()
    require_kept(["nowhere/*.jsonl", "hub:owner/name", "memory://x.jsonl"], tmp_path)


@pytest.mark.parametrize("weight", [float("inf"), float("nan"), 1e308, 0.0, -1.0, 1e-320])
def test_weights_are_numbers_that_can_be_shared_by(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        DataSource(path="x.jsonl", weight=weight)


ANNOTATED = {
    "notes/*.jsonl": ["b[1]", "plain"],
    "notes/b[1].jsonl": ["b[1]"],
    "notes/**/*.jsonl": ["b[1]", "plain", "deep"],
    "notes": ["b[1]", "plain", "deep"],
    "~/own.jsonl": ["own"],
    "~/*.jsonl": ["own"],
    "other/*.jsonl": [],
    "none": [],
}


@pytest.mark.parametrize(("pattern", "names"), ANNOTATED.items())
@pytest.mark.parametrize("source", ["world", "files"])
def test_annotations_are_found_as_all_files_are(
    source: str, pattern: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("notes/plain", "notes/b[1]", "notes/deep/deep", "home/own"):
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(pair(f"What is {file.stem}?", "good", "bad")))
    config = (
        WORLD if source == "world" else from_files(tmp_path, [pair("Q?", "a", "b")])
    ).model_dump()
    raw, _ = run(CollectConfig.model_validate(config | {"annotations": pattern}), tmp_path)
    pairs = rows_of_table(read_table(raw / "preferences/data.parquet"), Preference)
    assert {
        p.prompt[-1].content[8:-1] for p in pairs if (p.chosen, p.rejected) == ("good", "bad")
    } == set(names)


def test_annotations_that_cannot_be_read_are_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "data/annotations").mkdir(parents=True)
    (tmp_path / "data/annotations/alice.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(
        DataError, match=r"alice\.jsonl is no file .*correct it in collect\.annotations"
    ):
        run(WORLD, tmp_path)
    for url in ("s3://bucket/pairs.jsonl", "hub:owner/pairs"):
        with pytest.raises(ValueError, match=r"go into collect\.files\.preferences"):
            CollectConfig(annotations=url)


@pytest.mark.parametrize(
    "names", [["pairs.jsonl"], ["en/pairs.jsonl", "zh/pairs.jsonl"], ["a/x/p.jsonl", "b/x/p.jsonl"]]
)
def test_rows_are_the_same_wherever_the_workspace_lies(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        row = {"prompt": f"question {number}?", "chosen": "yes", "rejected": "no"}
        file.write_text(json.dumps(row) + "\n")
    tables = []
    for folder in (tmp_path / "here", tmp_path / "runs" / "there", tmp_path / "data"):
        folder.mkdir(parents=True, exist_ok=True)
        spelled = tuple(os.path.relpath(tmp_path / "data" / name, folder) for name in names)
        files = FileSources(preferences=spelled)
        collect.collect(
            CollectConfig(source="files", files=files, annotations=None), folder, folder / "raw"
        )
        tables.append((folder / "raw" / "preferences" / "data.parquet").read_bytes())
    assert tables[0] == tables[1] == tables[2]
    rows = (
        pq.read_table(tmp_path / "here/raw/preferences/data.parquet").column("source").to_pylist()
    )
    assert len(set(rows)) == len(names), "files of one name are told apart"
    assert all(name.endswith(row) for name, row in zip(names, rows, strict=True))

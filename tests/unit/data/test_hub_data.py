"""Hub ids with configuration, revision and split; the commit is pinned, and with a limit the rest stays unread.

The data sets here are folders: ``HUB_PATH`` without its prefix makes the library read them. What the hub itself answers
is not part of these tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.collect import CollectConfig, FileSources
from rlhf_core.data import hub
from rlhf_core.data.hub import HubId, load_hub_records, parse_hub_id
from rlhf_core.data.sources import read_sources
from rlhf_core.errors import DataError
from rlhf_core.files import read_json
from rlhf_core.stages.collect import collect

PAIR = {"prompt": "Hi?", "chosen": "yes", "rejected": "no"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: easy
  data_files: [{split: train, path: easy.jsonl}, {split: test, path: test.jsonl}]
- config_name: hard
  data_files: [{split: train, path: hard.jsonl}]
---
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


@pytest.mark.parametrize("spec", ["hub:", "hub:/name", "hub:a/b/c/d", "hub:a/b@", "hub:a/b@v1@v2", "hub:a b"])
def test_what_is_no_hub_id(spec: str) -> None:
    with pytest.raises(DataError, match="is not a hub id; write hub:owner/name"):
        parse_hub_id(spec)


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A data set of two configurations in the folder owner/name, taken for one of a hub that answers ``COMMIT``."""
    import datasets

    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for name, count in (("easy", 5), ("hard", 2), ("test", 3)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(PAIR | {"category": name}) + "\n" for _ in range(count))
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "HUB_PATH", "{}")
    monkeypatch.setattr(hub, "_resolved", lambda hub_id: COMMIT)
    monkeypatch.setattr("rlhf_core.hub.require_hub", lambda *arguments: None)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    build = datasets.load_dataset_builder

    def of_commit(name: str, config: str | None, revision: str) -> Any:
        builder = build(name, config, cache_dir=str(tmp_path / "cache"))
        builder.hash = revision  # as the library sets it for a data set of the hub
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", of_commit)
    return monkeypatch


def test_rows_of_a_configuration_and_a_split(online: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = load_hub_records("hub:owner/name/hard")
    assert (len(loaded.records), loaded.total, loaded.commit) == (2, 2, COMMIT)
    assert load_hub_records("hub:owner/name/easy:test").total == 3
    with pytest.raises(DataError, match=r"hub:owner/name/none: cannot load the data set \(.*none.*; check the id"):
        load_hub_records("hub:owner/name/none")
    config = CollectConfig(source="files", files=FileSources(preferences=("hub:owner/name/easy",)))
    collect(config, tmp_path, tmp_path / "raw")
    (file,) = read_json(tmp_path / "raw/manifest.json")["kinds"]["preferences"]["files"]
    assert (file["source"], file["rows"], file["revision"]) == ("hub:owner/name/easy", 5, COMMIT)


def test_with_a_limit_the_rest_is_not_downloaded(online: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    online.setattr(datasets.DatasetBuilder, "download_and_prepare", lambda self: 1 / 0)
    (result,) = read_sources(["hub:owner/name/easy"], "preferences", tmp_path, limit=2)
    assert (len(result.rows), result.unread, result.revision) == (2, None, COMMIT)


def test_a_copy_of_another_commit_is_not_taken(online: pytest.MonkeyPatch) -> None:
    import datasets

    build = datasets.load_dataset_builder

    def cached(name: str, config: str | None, revision: str) -> Any:
        return build(name, config, revision=COMMIT)

    online.setattr(datasets, "load_dataset_builder", cached)
    online.setattr(hub, "_resolved", lambda hub_id: "f" * 40)
    with pytest.raises(DataError, match=f"the cached copy is of the commit {COMMIT}"):
        load_hub_records("hub:owner/name/hard@main")


def test_offline_only_a_commit_is_a_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    monkeypatch.setattr("rlhf_core.hub.require_hub", lambda *arguments: None)
    with pytest.raises(DataError, match="name the commit itself: v1 cannot be looked up"):
        load_hub_records("hub:owner/name@v1")

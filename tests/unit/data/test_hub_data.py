"""Hub ids with configuration, revision and split; the commit is pinned, also where a copy in the cache is read.

The library talks to a stand-in of the hub, in a process of its own: it takes the hub's address when it is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import command_environment
from hub_stand_in import hub_stand_in

from rlhf_core.data.collection.sources import HubId, parse_hub_id
from rlhf_core.errors import DataError

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


@pytest.mark.parametrize("spec", ["hub:", "hub:/name", "hub:a/b/c/d", "hub:a/b@", "hub:a/b@v1@v2", "hub:a b"])
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
        specs = ["hub:owner/name/easy", "hub:owner/name/easy@v1:test 2", f"hub:owner/name/hard@{OLD}"]
        wrong = ["hub:owner/name/hard@v2", "hub:owner/name/soft", "hub:owner/name/easy:dev", "hub:owner/none"]
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

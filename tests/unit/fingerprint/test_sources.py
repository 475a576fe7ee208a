"""DVC sees a change of every file that is named: of data, of an evaluation, of reward sources, of a
starting model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import yaml_text
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.paths import rebase_sources
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.fingerprint.tracked_files import (
    REWARD_SOURCES_FILE,
    STARTING_MODEL_FILE,
    tokenizer_patterns,
    write_evaluation_inputs,
    write_sources,
    write_starting_model,
    write_tracked_files,
)
from rlhf_core.models.folder_check import SMALL_FILES
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
    for spec, expected in (
        ("../data/*", "../data/x.jsonl"),
        (f"{tmp_path}/data/*", f"{tmp_path}/data/x.jsonl"),
    ):
        (path,) = expand(spec, workspace)
        assert spelled(path, spec, workspace) == expected


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    """As of a copy that keeps times, or an editor that restores them."""
    path = tmp_path / "x.jsonl"
    path.write_text(ROW % "b")
    first, times = (
        fingerprint(tmp_path, "x.jsonl"),
        (path.stat().st_atime_ns, path.stat().st_mtime_ns),
    )
    path.write_text(ROW % "c")
    os.utime(path, ns=times)
    assert fingerprint(tmp_path, "x.jsonl") != first


EVALUATE = {
    "verifiable": {"path": "checks.jsonl", "functions": {"f": "rules_seen:f"}},
    "multiple_choice": {"files": ["val/*.csv"], "few_shot": 1, "few_shot_files": ["dev/*.csv"]},
    "opponents": [{"name": "other", "path": "replies.jsonl"}],
}


@pytest.mark.parametrize(
    "changed",
    [
        "checks.jsonl",
        "rules_seen.py",
        "val/things_val.csv",
        "val/城市_val.csv",
        "dev/things_dev.csv",
        "replies.jsonl",
    ],
)
def test_a_change_of_what_an_evaluation_reads_is_seen(changed: str, tmp_path: Path) -> None:
    """Of a file, of a function's code, and of a file that a pattern finds only then."""
    for file in (
        "checks.jsonl",
        "rules_seen.py",
        "val/things_val.csv",
        "dev/things_dev.csv",
        "replies.jsonl",
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("def f(prompt, reply):\n    return True\n")
    seen = []
    for settings in (EVALUATE, EVALUATE, {}):
        write_evaluation_inputs(tmp_path, EvaluateConfig.model_validate(settings))
        seen.append((tmp_path / ".fingerprints/verifiable.txt").read_text())
        (tmp_path / changed).write_text("def f(prompt, reply):\n    return False\n")
    assert (
        seen[0] != seen[1] and (changed.endswith(".py") or changed in seen[1]) and seen[2] == "\n"
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    files = {
        "models/reward/model.safetensors": "own",
        "extra/rm/model.safetensors": "weights",
        "extra/rm/config.json": "{}",
        "rules.py": "import helper\nfrom pack.part import x\ndef f(p, r):\n    return [1.0]\n",
        "helper.py": "Y = 1\n",
        "other.py": "Z = 1\n",
        "pack/__init__.py": "",
        "pack/part.py": "from . import deep\nfrom .deep import x\n",
        "pack/deep.py": "x = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def seen(workspace: Path, *values: dict[str, Any]) -> str:
    """What DVC would compare."""
    reward = {"sources": list(values)} if values else {}
    write_tracked_files(workspace, PpoConfig.model_validate({"reward": reward}))
    return (workspace / REWARD_SOURCES_FILE).read_text()


MODEL, FUNCTION = {"kind": "model", "path": "extra/rm"}, {"kind": "function", "target": "rules:f"}
ENSEMBLE = {"kind": "ensemble", "paths": ["models/reward", "extra/rm"]}
CLASSIFIER = {"kind": "classifier", "model": "extra/rm"}


def test_the_default_reads_nothing_that_dvc_does_not_know(workspace: Path) -> None:
    before = seen(workspace)
    (workspace / "models/reward/model.safetensors").write_text("trained again")
    assert seen(workspace) == before == "\n"


def test_a_server_counts_by_the_code_that_asks_it(workspace: Path) -> None:
    line = seen(workspace, {"kind": "http", "url": "http://a"})
    assert line.startswith("rlhf.reward_sources http: rlhf-pipeline ")
    assert line == seen(workspace, {"kind": "http", "url": "http://b"})


@pytest.mark.parametrize("source", [MODEL, ENSEMBLE, CLASSIFIER], ids=lambda source: source["kind"])
def test_a_model_folder_counts_by_content(workspace: Path, source: dict[str, Any]) -> None:
    before = seen(workspace, source)
    assert seen(workspace, source) == before != "\n"
    (workspace / "models/reward/model.safetensors").write_text("trained again")
    assert seen(workspace, source) == before
    (workspace / "extra/rm/model.safetensors").write_text("other weights")
    changed = seen(workspace, source)
    assert changed != before
    (workspace / "extra/rm/merges.txt").write_text("new")
    assert seen(workspace, source) not in (before, changed)


def test_a_hub_id_is_only_a_name(workspace: Path) -> None:
    assert seen(workspace, {"kind": "classifier", "model": "owner/name"}) == "\n"


@pytest.mark.parametrize(
    ("file", "text", "stale"),
    [
        (
            "rules.py",
            "import helper\nfrom pack.part import x\ndef f(p, r):\n    return [2.0]\n",
            True,
        ),
        (
            "rules.py",
            '"""New."""\nimport helper\nfrom pack.part import x  # why\ndef f(p, r): return [1.0]\n',
            False,
        ),
        ("helper.py", "Y = 2\n", True),
        ("pack/__init__.py", "A = 1\n", True),
        ("pack/deep.py", "x = 2\n", True),
        ("other.py", "Z = 2\n", False),
    ],
)
def test_a_function_counts_by_the_code_it_reaches(
    workspace: Path, file: str, text: str, stale: bool
) -> None:
    before = seen(workspace, FUNCTION)
    (workspace / file).write_text(text)
    assert (seen(workspace, FUNCTION) != before) is stale


def test_looking_never_runs_the_code(workspace: Path) -> None:
    (workspace / "rules.py").write_text("raise SystemExit('imported')\ndef f(p, r): return [1.0]\n")
    (workspace / "pack/__init__.py").write_text("raise SystemExit('imported')\n")
    seen(workspace, FUNCTION, {"kind": "function", "target": "pack.deep:x", "name": "deep"})
    assert "rules" not in sys.modules and "pack" not in sys.modules


def test_broken_and_missing_code_is_left_to_the_stage(workspace: Path) -> None:
    (workspace / "rules.py").write_text("def f(:\n")
    broken = seen(workspace, FUNCTION)
    (workspace / "rules.py").unlink()
    assert seen(workspace, FUNCTION) == "rules:f\n" != broken


def test_of_an_installed_module_only_the_file_itself_counts(workspace: Path) -> None:
    lines = seen(workspace, {"kind": "function", "target": "json.decoder:scanstring"}).splitlines()
    assert len(lines) == 2 and lines[1].startswith("  json.decoder ")


def recorded(workspace: Path, source: str) -> str:
    write_starting_model(workspace, source)
    return (workspace / STARTING_MODEL_FILE).read_text()


@pytest.mark.parametrize(
    "source", ["own/model", "own/model/weights.gguf", "own/m[1]~/weights.gguf"]
)
def test_a_changed_file_changes_what_dvc_compares(tmp_path: Path, source: str) -> None:
    file = tmp_path / (source if source.endswith(".gguf") else f"{source}/weights.safetensors")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"one")
    first = recorded(tmp_path, source)
    assert file.name in first and recorded(tmp_path, source) == first
    file.write_bytes(b"other")
    assert recorded(tmp_path, source) != first


@pytest.mark.parametrize("source", ["scratch", "owner/name"])
def test_what_is_no_file_is_left_to_the_parameters(tmp_path: Path, source: str) -> None:
    assert recorded(tmp_path, source).strip() == ""


@pytest.mark.parametrize(
    ("source", "moves"),
    [
        ("own/model", True),
        ("own/weights.gguf", True),
        ("models/x.gguf", True),
        (
            "models/sft",
            True,
        ),  # of another workspace: a starting model is never what a later stage makes of it
        ("owner/name", False),
        ("models/name", False),  # nothing is there, so it may be a hub id
        ("scratch", False),
        ("/abs/model", False),
    ],
)
def test_a_relative_path_moves_with_the_workspace(tmp_path: Path, source: str, moves: bool) -> None:
    origin, target = tmp_path / "here", tmp_path / "runs" / "there"
    (origin / "own" / "model").mkdir(parents=True)
    (origin / "own" / "weights.gguf").write_bytes(b"GGUF")
    (origin / "models" / "sft").mkdir(parents=True)
    (origin / "models" / "x.gguf").write_bytes(b"GGUF")
    (origin / "scratch").mkdir()  # a folder of this name does not make it a model
    document = yaml_text.parse(
        rebase_sources(f"base: {{source: {source}}}\n", origin, target), "params.yaml"
    )
    moved = str(document["base"]["source"])
    assert (
        (os.path.normpath(target / moved) == str(origin / source)) if moves else (moved == source)
    )


def test_of_a_tokenizer_to_count_with_the_weights_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    assert tokenizer_patterns(tmp_path, "own") == [f"own/{pattern}" for pattern in SMALL_FILES]
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    assert tokenizer_patterns(tmp_path, "weights.gguf") == ["weights.gguf"]
    assert (
        tokenizer_patterns(tmp_path, "owner/name") == []
        and tokenizer_patterns(tmp_path, None) == []
    )


def test_the_tokenizer_to_count_with_moves_with_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "here/own").mkdir(parents=True)
    text = rebase_sources("validate: {tokenizer: own}\n", tmp_path / "here", tmp_path / "there")
    assert yaml_text.parse(text, "params.yaml")["validate"]["tokenizer"] == "../here/own"

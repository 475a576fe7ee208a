"""What DVC sees of the sources: model folders by content, functions by what their code does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rlhf_core.config.reward_sources import DEFAULT_SOURCES, RewardSources
from rlhf_core.fingerprint.tracked_files import REWARD_SOURCES_FILE, write_tracked_files


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
    sources = TypeAdapter(RewardSources).validate_python(list(values)) if values else DEFAULT_SOURCES
    write_tracked_files(workspace, sources)
    return (workspace / REWARD_SOURCES_FILE).read_text()


MODEL, FUNCTION = {"kind": "model", "path": "extra/rm"}, {"kind": "function", "target": "rules:f"}
ENSEMBLE = {"kind": "ensemble", "paths": ["models/reward", "extra/rm"]}
CLASSIFIER = {"kind": "classifier", "model": "extra/rm"}


def test_the_default_reads_nothing_that_dvc_does_not_know(workspace: Path) -> None:
    before = seen(workspace)
    (workspace / "models/reward/model.safetensors").write_text("trained again")
    assert seen(workspace) == before == "\n" == seen(workspace, {"kind": "http", "url": "http://a"})


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
        ("rules.py", "import helper\nfrom pack.part import x\ndef f(p, r):\n    return [2.0]\n", True),
        ("rules.py", '"""New."""\nimport helper\nfrom pack.part import x  # why\ndef f(p, r): return [1.0]\n', False),
        ("helper.py", "Y = 2\n", True),
        ("pack/__init__.py", "A = 1\n", True),
        ("pack/deep.py", "x = 2\n", True),
        ("other.py", "Z = 2\n", False),
    ],
)
def test_a_function_counts_by_the_code_it_reaches(workspace: Path, file: str, text: str, stale: bool) -> None:
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

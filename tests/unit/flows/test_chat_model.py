"""What ``rlhf chat`` says of a model before it answers."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.commands.serve import TOY, PolicyChoice, about_folder, served_source
from flows.registry.evidence import TrainingSource, source_of_version, source_of_workspace

LOCK = """
stages:
  collect: {params: {params.yaml: {collect: {source: SOURCE, files: {preferences: [a.jsonl, b.jsonl]}}, seed: 1}}}
  base: {params: {params.yaml: {base: {source: BASE}, seed: 1}}}
"""


def workspace_with(folder: Path, source: str, base: str) -> Path:
    for name in ("params.yaml", "dvc.yaml"):
        (folder / name).write_text("{}\n")
    (folder / "dvc.lock").write_text(LOCK.replace("SOURCE", source).replace("BASE", base))
    (folder / "metrics").mkdir()
    (folder / "metrics" / "data.json").write_text(json.dumps({"preferences": {"clean": 9000.0, "train": 5998.0}}))
    return folder


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    written = datetime(2026, 3, 4, 5, 6).timestamp()
    os.utime(folder / "config.json", (written, written))
    return folder


def test_the_policy_of_the_demo_is_said_to_be_a_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = workspace_with(tmp_path, "world", "scratch")
    model = served_source(None, PolicyChoice(model_in(workspace / "models" / "policy")))
    assert model.workspace == workspace
    assert model.about == (
        "the model in models/policy, written 2026-03-04 05:06",
        "trained on 5,998 preference pairs of the synthetic world; base: random weights",
        TOY,
    )
    assert "lamps" in TOY and len(TOY) <= 80


def test_own_data_and_a_pretrained_base_are_named_and_are_no_toy(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "files", "HuggingFaceTB/SmolLM2-135M")
    about = about_folder(model_in(workspace / "models" / "policy"))
    assert about[1:] == ("trained on 5,998 preference pairs from a.jsonl, b.jsonl; base: HuggingFaceTB/SmolLM2-135M",)


def test_another_model_of_a_workspace_is_not_said_to_be_trained_on_pairs(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "world", "scratch")
    about = about_folder(model_in(workspace / "models" / "sft"))
    assert about[1].startswith("from a pipeline on 5,998 preference pairs")


def test_a_folder_outside_of_workspaces_is_described_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert about_folder(Path("nothing/here")) == ("the model in nothing/here",)


def test_before_the_first_run_nothing_is_known(tmp_path: Path) -> None:
    assert source_of_workspace(tmp_path) is None


class Runs:
    """Runs of an MLflow client by id."""

    def __init__(self, **runs: SimpleNamespace) -> None:
        self.runs = runs

    def get_run(self, run_id: str) -> SimpleNamespace:
        return SimpleNamespace(data=self.runs[run_id])


def test_the_source_of_a_version_is_that_of_the_run_that_registered_it() -> None:
    own = SimpleNamespace(tags={"mlflow.parentRunId": "parent"}, metrics={"data.preferences.train": 12.0})
    params = {
        "collect.source": "files",
        "base.source": "scratch",
        "collect.files.preferences": "['x.jsonl', 'y.jsonl']",
    }
    client: Any = Runs(own=own, parent=SimpleNamespace(params=params))
    version: Any = SimpleNamespace(run_id="own")
    assert source_of_version(client, version) == TrainingSource("files", "scratch", "x.jsonl, y.jsonl", 12)


def test_a_version_without_a_pipeline_run_has_no_known_source() -> None:
    client: Any = Runs(own=SimpleNamespace(tags={}, metrics={}))
    for run_id in ("own", None):
        version: Any = SimpleNamespace(run_id=run_id)
        assert source_of_version(client, version) is None

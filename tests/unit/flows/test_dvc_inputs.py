"""Refreshing the inputs of a recipe takes nothing from its stages that they read."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT

from flows.commands.init import initialise
from flows.dvc_repo.inputs import with_sources
from rlhf_core.config import yaml_text
from rlhf_core.config.data import ValidateConfig
from rlhf_core.config.loading import load_params
from rlhf_core.stages import collect, evaluate, validate

RECIPE = "dvc.yaml"
READING_FILES = {module.STAGE.name: module.STAGE for module in (collect, validate, evaluate)}


def dependencies(text: str, stage: str) -> list[str]:
    return list(yaml_text.plain(yaml_text.parse(text, RECIPE))["stages"][stage]["deps"])


def test_the_recipe_of_the_repository_is_left_as_it_is() -> None:
    text = (ROOT / RECIPE).read_text()
    assert with_sources(text, load_params(ROOT), ROOT) == text


@pytest.mark.parametrize("profile", ["own-data", None])
def test_a_new_workspace_compares_everything_that_a_stage_reads(
    profile: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = (initialise(tmp_path / "run", profile, []) / RECIPE).read_text()
    for name, stage in READING_FILES.items():
        assert {*stage.inputs.values()} <= {*dependencies(recipe, name)}


def test_a_recipe_that_lost_the_suites_gets_them_back(tmp_path: Path) -> None:
    whole = (ROOT / RECIPE).read_text()
    lacking = whole.replace("data/raw, expectations]", "data/raw]")
    assert lacking != whole
    assert with_sources(lacking, load_params(ROOT), tmp_path) == whole


def test_source_files_come_after_them_and_go_alone(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "p"}\n')
    whole = (ROOT / RECIPE).read_text()
    params = load_params(ROOT)
    named = ValidateConfig(evaluation_files=[{"path": str(held_out)}])  # type: ignore[list-item]
    added = with_sources(whole, params.model_copy(update={"validate_": named}), tmp_path)
    assert dependencies(added, "validate") == [*dependencies(whole, "validate"), "held_out.jsonl"]
    assert with_sources(added, params, tmp_path) == whole

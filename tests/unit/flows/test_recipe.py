"""dvc.yaml of a workspace: its inputs are refreshed, and parameters that it names and params.yaml
lacks are told.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ROOT

from flows.commands.init import initialise, predecessor
from flows.commands.run import run
from flows.commands.status import stages_status
from flows.commands.up import up
from flows.dvc_repo.inputs import with_sources
from flows.dvc_repo.recipe import check_recipe, tracked_params
from flows.registry import stored_models
from rlhf_core.config import yaml_text
from rlhf_core.config.data import ValidateConfig
from rlhf_core.config.loading import check_params, load_params
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import merge
from rlhf_core.errors import ConfigError
from rlhf_core.stages import collect, evaluate, validate

RECIPE = "dvc.yaml"
READING_FILES = {module.STAGE.name: module.STAGE for module in (collect, validate, evaluate)}


def dependencies(text: str, stage: str) -> list[str]:
    return list(yaml_text.plain(yaml_text.parse(text, RECIPE))["stages"][stage]["deps"])


def test_the_recipe_of_the_repository_is_left_as_it_is() -> None:
    text = (ROOT / RECIPE).read_text()
    assert with_sources(text, load_params(ROOT), ROOT) == text


def test_a_new_workspace_compares_all_that_a_stage_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a profile of its own; tests/architecture compares the recipe of the repository."""
    monkeypatch.chdir(tmp_path)
    recipe = (initialise(tmp_path / "run", "own-data", []) / RECIPE).read_text()
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


def workspace(folder: Path, params: str) -> Path:
    shutil.copy(ROOT / "dvc.yaml", folder / "dvc.yaml")
    (folder / "params.yaml").write_text(params)
    return folder


def test_the_names_are_those_of_params_yaml_and_a_section_precedes_its_parts(
    tmp_path: Path,
) -> None:
    stages = "{a: {cmd: x, params: [seed, ppo.kl, {params.yaml: [sft], other.yaml: [z]}]}, b: {cmd: y, params: [ppo]}}"
    (tmp_path / "dvc.yaml").write_text(f"stages: {stages}\n")
    assert tracked_params(tmp_path) == ["ppo", "ppo.kl", "seed", "sft"]


def test_the_recipe_leaves_out_none() -> None:
    check_recipe(ROOT)


def test_a_null_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {a: {cmd: x, params: [collect.limit]}}\n")
    (tmp_path / "params.yaml").write_text("collect: {limit: null}\n")
    check_recipe(tmp_path)


def test_the_lines_of_the_message_complete_the_file_and_change_nothing(tmp_path: Path) -> None:
    present = "gates: {mode: report, reward: [], policy: []}\nppo: {iterations: 30}\ncollect: {limit: 7}\n"
    with pytest.raises(ConfigError) as refusal:
        check_recipe(workspace(tmp_path, present))
    message = str(refusal.value).splitlines()
    assert (
        message[0].startswith(f"{tmp_path / 'params.yaml'} leaves out parameters")
        and "collect" not in message
    )
    lines = "\n".join(line[2:] for line in message if line.startswith("  "))
    assert "seed: 1\n" in lines and "  kl: {}" in lines and "sft: {}\n" in lines
    workspace(tmp_path, merge(present, [("the lines", lines)]))
    check_recipe(tmp_path)
    assert check_params(yaml_text.read(tmp_path / "params.yaml")) == check_params(
        yaml_text.parse(present, "p")
    )


def test_no_gate_is_suggested_that_would_refuse_every_model(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"add gates\.policy, gates\.reward, which no default"
    ) as refusal:
        check_recipe(workspace(tmp_path, ""))
    assert "mode: enforce" in str(refusal.value) and Params().gates.reward == ()


CONFLICT = """schema: '2.0'
stages:
  ppo:
<<<<<<< HEAD
    cmd: one
=======
    cmd: other
>>>>>>> try-2
"""


@pytest.mark.parametrize("name", ["dvc.lock", "dvc.yaml", "params.yaml"])
def test_conflicts_of_a_merge_are_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    (tmp_path / "dvc.yaml").write_text("stages: {a: {cmd: x, params: [seed]}}\n")
    (tmp_path / name).write_text(CONFLICT)
    refusals = []
    for ask in (check_recipe, stages_status, lambda folder: run(folder, promote=False)):
        with pytest.raises(
            ConfigError, match=r"has conflicts of a merge, the first in line 4; "
        ) as refusal:
            if name == "params.yaml" and ask is stages_status:
                load_params(tmp_path)
            ask(tmp_path)
        refusals.append(str(refusal.value))
    assert all(said.startswith(str(tmp_path / name)) and "\n" not in said for said in refusals)
    assert all(
        ("git checkout --ours dvc.lock" in said) == (name == "dvc.lock") for said in refusals
    )
    assert not (tmp_path / ".rlhf").exists(), "no server, and nothing else either"


def test_a_line_of_equals_signs_or_arrows_in_a_text_is_no_conflict() -> None:
    text = "title: |\n  Heading\n  =======\n  <<<<<<< as quoted\n"
    assert yaml_text.parse(text, "params.yaml")["title"].startswith("Heading")


@pytest.mark.parametrize("command", ["run", "up"])
def test_nothing_is_started_before_the_check(tmp_path: Path, command: str) -> None:
    folder = workspace(tmp_path, "")
    with pytest.raises(ConfigError, match="leaves out parameters"):
        if command == "run":
            run(folder)
        else:
            up(folder)
    assert not (folder / ".dvc").exists() and not (folder / ".rlhf" / "logs").exists()


@pytest.mark.parametrize("alias", ["", "@previous"])
def test_a_next_generation_starts_as_the_registered_policy_by_its_workspace_s_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = initialise(
        tmp_path / "before", "own-data", ["base.source=org/model", "ppo.iterations=70"]
    )
    stored = tmp_path / "stored" / "model"
    stored.mkdir(parents=True)
    asked: list[str] = []

    def version_of(workspace: Path, name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(name="rlhf-policy", version="3")

    monkeypatch.setattr(stored_models, "policy_with_alias", version_of)
    monkeypatch.setattr(stored_models, "verified_folder", lambda workspace, version: stored)
    found = predecessor(f"before{alias}")
    data = ["collect.source=files", 'collect.files.preferences=["new.jsonl"]']
    made = initialise(
        tmp_path / "after", None, data, recipe=found.workspace, beneath=found.settings
    )
    params = load_params(made)
    assert asked == [alias.removeprefix("@") or "champion"]
    assert params.base.source == str(stored) and params.sft.steps == 0
    assert params.ppo.iterations == 70 and params.validate_.split.fewest_balanced == 60, (
        "settings go on"
    )
    assert params.collect.files.paths() == ["../new.jsonl"] and before == found.workspace


@pytest.mark.parametrize("profile", ["demo", "smoke"])
def test_a_next_generation_of_a_model_made_from_nothing_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    """What suited a model of this size suits its policy; the world's truth is known of no file."""
    monkeypatch.chdir(tmp_path)
    before = load_params(initialise(tmp_path / "before", profile, []))
    stored = tmp_path / "stored" / "model"
    stored.mkdir(parents=True)
    version = SimpleNamespace(name="rlhf-policy", version="3")
    monkeypatch.setattr(stored_models, "policy_with_alias", lambda workspace, name: version)
    monkeypatch.setattr(stored_models, "verified_folder", lambda workspace, version: stored)
    found = predecessor("before")
    without, left_out = found.for_files()
    data = ["collect.source=files", 'collect.files.preferences=["new.jsonl"]']
    beneath = [*found.settings, *without]
    made = initialise(tmp_path / "after", None, data, recipe=found.workspace, beneath=beneath)
    after = load_params(made)
    assert after.ppo == before.ppo and after.reward == before.reward
    assert after.sft.optimizer == before.sft.optimizer and after.sft.steps == 0
    asked = {condition.metric for condition in (*after.gates.reward, *after.gates.policy)}
    asked_before = {condition.metric for condition in (*before.gates.reward, *before.gates.policy)}
    of_the_world = {name for name in asked_before if "world" in name or "gold" in name}
    assert asked_before - asked == of_the_world == {*left_out} and asked <= asked_before

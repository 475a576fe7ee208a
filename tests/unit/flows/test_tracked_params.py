"""Parameters that dvc.yaml names and params.yaml leaves out: refused at once, with the lines to add."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import ROOT

from flows.commands.run import run
from flows.commands.up import up
from flows.dvc_repo.recipe import check_tracked_params, tracked_params
from rlhf_core.config import yaml_text
from rlhf_core.config.loading import Params, check_params, merge
from rlhf_core.errors import ConfigError


def workspace(folder: Path, params: str) -> Path:
    shutil.copy(ROOT / "dvc.yaml", folder / "dvc.yaml")
    (folder / "params.yaml").write_text(params)
    return folder


def test_the_names_are_those_of_params_yaml_and_a_section_precedes_its_parts(tmp_path: Path) -> None:
    stages = "{a: {cmd: x, params: [seed, ppo.kl, {params.yaml: [sft], other.yaml: [z]}]}, b: {cmd: y, params: [ppo]}}"
    (tmp_path / "dvc.yaml").write_text(f"stages: {stages}\n")
    assert tracked_params(tmp_path) == ["ppo", "ppo.kl", "seed", "sft"]


def test_the_recipe_leaves_out_none() -> None:
    check_tracked_params(ROOT)


def test_a_null_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {a: {cmd: x, params: [collect.limit]}}\n")
    (tmp_path / "params.yaml").write_text("collect: {limit: null}\n")
    check_tracked_params(tmp_path)


def test_the_lines_of_the_message_complete_the_file_and_change_nothing(tmp_path: Path) -> None:
    present = "gates: {mode: report, reward: [], policy: []}\nppo: {iterations: 30}\ncollect: {limit: 7}\n"
    with pytest.raises(ConfigError) as refusal:
        check_tracked_params(workspace(tmp_path, present))
    message = str(refusal.value).splitlines()
    assert message[0].startswith(f"{tmp_path / 'params.yaml'} leaves out parameters") and "collect" not in message
    lines = "\n".join(line[2:] for line in message if line.startswith("  "))
    assert "seed: 1\n" in lines and "  kl: {}" in lines and "sft: {}\n" in lines
    workspace(tmp_path, merge(present, [("the lines", lines)]))
    check_tracked_params(tmp_path)
    assert check_params(yaml_text.read(tmp_path / "params.yaml")) == check_params(yaml_text.parse(present, "p"))


def test_no_gate_is_suggested_that_would_refuse_every_model(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"add gates\.policy, gates\.reward, which no default can stand for"
    ) as refusal:
        check_tracked_params(workspace(tmp_path, ""))
    assert "mode: enforce" in str(refusal.value) and Params().gates.reward == ()


@pytest.mark.parametrize("command", ["run", "up"])
def test_nothing_is_started_before_the_check(tmp_path: Path, command: str) -> None:
    folder = workspace(tmp_path, "")
    with pytest.raises(ConfigError, match="leaves out parameters"):
        if command == "run":
            run(folder)
        else:
            up(folder)
    assert not (folder / ".dvc").exists() and not (folder / ".rlhf" / "logs").exists()

"""dvc.yaml says the same as the stages themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from rlhf_core.cli import fingerprint
from rlhf_core.config import yaml_text
from rlhf_core.config.gates import GatesConfig
from rlhf_core.config.policy import Method
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.stages.runtime.runner import STAGES, load_stage

ROOT = Path(__file__).resolve().parents[2]


def stages() -> dict[str, Any]:
    return yaml_text.plain(yaml_text.read(ROOT / "dvc.yaml"))["stages"]


def names(entries: list[Any]) -> set[str]:
    return {next(iter(e)) if isinstance(e, dict) else e for e in entries}


def test_every_stage_is_listed_in_order() -> None:
    assert tuple(stages()) == STAGES


@pytest.mark.parametrize("name", STAGES)
def test_files_and_parameters_agree(name: str) -> None:
    listed, declared = stages()[name], load_stage(name)
    assert listed["cmd"] == f"rlhf stage {name}"
    deps = set(listed["deps"])
    assert f".fingerprints/{name}.txt" in deps
    data = {dep for dep in deps if not dep.startswith(".fingerprints/")}
    required = {
        path for key, path in declared.inputs.items() if key not in declared.optional_inputs
    }
    assert required <= data <= set(declared.inputs.values())
    outs = (
        names(listed.get("outs", []))
        | names(listed.get("metrics", []))
        | names(listed.get("plots", []))
    )
    assert outs == set(declared.outputs.values())
    assert any(param.split(".")[0] == declared.section for param in listed["params"])


@pytest.mark.parametrize("method", get_args(Method))
def test_a_policy_by_any_method_reads_no_more_and_writes_the_same(method: Method) -> None:
    by_ppo, by_method = load_stage("ppo"), load_stage("ppo", method)
    assert by_method.method == method and by_method.outputs == by_ppo.outputs
    assert set(by_method.inputs.items()) <= set(by_ppo.inputs.items())


@pytest.mark.slow
def test_stages_depend_on_fingerprints_that_are_written(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    fingerprint(tmp_path)
    written = {f".fingerprints/{path.name}" for path in (tmp_path / ".fingerprints").iterdir()}
    deps = {
        dep
        for stage in stages().values()
        for dep in stage["deps"]
        if dep.startswith(".fingerprints/")
    }
    assert deps == written


def test_where_a_stage_runs_and_keeps_its_partial_state_makes_nothing_stale() -> None:
    listed = {
        param.split(".")[0] for stage in stages().values() for param in stage.get("params", [])
    }
    params = yaml_text.plain(yaml_text.read(ROOT / "params.yaml"))
    around = {"compute", "checkpoints", "pools", "flow", "registry", "tracking"}
    assert around <= params.keys() and not listed & around


def test_critic_pretraining_runs_again_when_the_units_change_that_it_shares_with_ppo() -> None:
    listed = {
        param.removeprefix("ppo.")
        for param in stages()["critic"]["params"]
        if param.startswith("ppo.")
    }
    # Batches within a rollout change no number.
    assert listed == set(RolloutConfig.model_fields) - {
        "micro_batch_size",
        "micro_batch_tokens",
        "sampling_batch_size",
    }


def test_every_list_of_conditions_is_decided_by_a_stage() -> None:
    lists = {
        f"gates.{name}"
        for name, field in GatesConfig.model_fields.items()
        if get_origin(field.annotation) is tuple
    }
    listed = {param for stage in stages().values() for param in stage.get("params", [])}
    assert lists and not lists - listed, "conditions that nothing decides would count as passed"


def test_the_evaluation_runs_again_when_the_training_distribution_changes() -> None:
    assert {"ppo.temperature", "ppo.min_new_tokens"} <= set(stages()["evaluate"]["params"])


@pytest.mark.parametrize("name", STAGES)
def test_every_listed_parameter_is_in_params_yaml(name: str) -> None:
    params = yaml_text.plain(yaml_text.read(ROOT / "params.yaml"))
    for path in stages()[name]["params"]:
        place = params
        for part in path.split("."):
            assert part in place, f"DVC stops at {path}"
            place = place[part]


def test_make_clean_removes_every_output() -> None:
    removed = set((ROOT / "Makefile").read_text().partition("\nclean:\n")[2].split())
    outputs = set().union(
        *(
            names(stage.get(key, []))
            for stage in stages().values()
            for key in ("outs", "metrics", "plots")
        )
    )
    assert outputs and not {out for out in outputs if not {out, out.split("/")[0]} & removed}

"""A user's wrong parameter gives one clear line with its path and the nearest valid name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.load import Params, check_params, load_section
from rlhf_core.config.overlay import merge, workspace_name
from rlhf_core.config.sft import SftConfig
from rlhf_core.errors import ConfigError

BASE = "seed: 3\nsft:\n  steps: 5  # few\n  optimizer:\n    lr: 1e-3\n"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"sft": {"stepz": 3}}, "unknown parameter 'sft.stepz'; did you mean 'steps'?"),
        ({"pppo": {}}, "unknown parameter 'pppo'; did you mean 'ppo'?"),
        ({"ppo": {"kl": {"coeficient": 0.1}}}, "unknown parameter 'ppo.kl.coeficient'; did you mean 'coefficient'?"),
        ({"sft": {"steps": "ten"}}, "parameter 'sft.steps': input should be a valid integer (got 'ten')"),
        ({"sft": {"steps": 0}}, "parameter 'sft.steps': input should be greater than 0 (got 0)"),
        ({"ppo": {"kl": {"estimator": "k3"}}}, "does not give the gradient of the KL"),
        ({"ppo": {"batch_size": 63}}, "batch_size 63 is not a multiple of minibatches 2"),
        ({"pools": {"ppo": {"pool": "g", "gpuz": 1}}}, "unknown parameter 'pools.ppo.gpuz'; did you mean 'gpus'?"),
        ({"pools": {"ppo": {"pool": "g", "memory": "64 GB"}}}, "write a quantity as Kubernetes does, such as 64Gi"),
        ({"pools": {"ppo": 3}}, "name a work pool, or give a mapping with pool"),
        (
            {"pools": {"ppo": {"pool": "g", "gpus": 1, "variables": {"gpus": 2}}}},
            "variables repeats gpus, which has a place of its own here",
        ),
        ({"work_pools": {"g": {"queue": {}}}}, "unknown parameter 'work_pools.g.queue'; did you mean 'queues'?"),
        ({"gates": {"policy": [{"metric": "kl", "why": "x"}]}}, "give exactly one of at_least, at_most, at_most_of"),
    ],
)
def test_problems_are_told_with_path_and_remedy(document: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_params(document)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_each_of_several_problems_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        check_params({"sft": {"stepz": 3}, "ppo": {"iterations": -1}})
    assert len(str(caught.value).splitlines()) == 2


def test_defaults_are_valid_and_sets_keep_comments() -> None:
    assert check_params({}) == Params()
    text = merge(BASE, sets=["sft.steps=7", "ppo.kl.coefficient=2e-2", "ppo.advantage.clip=null"])
    assert "# few" in text and "steps: 7" in text
    assert "coefficient: 2e-2" in text.replace("0.02", "2e-2")


@pytest.mark.parametrize("assignment", ["sft.steps", "=3", "sft.stepz=3", "sft.steps=many"])
def test_bad_assignments_are_refused(assignment: str) -> None:
    with pytest.raises(ConfigError):
        merge(BASE, sets=[assignment])


def test_overlay_wins_over_base_and_set_over_overlay() -> None:
    text = merge(BASE, [("p", "sft: {steps: 9, batch_size: 4}")], ["sft.batch_size=8"])
    assert "steps: 9" in text and "batch_size: 8" in text and "lr: 1e-3" in text


def test_section_takes_the_seed_from_the_top(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(BASE)
    section = load_section(tmp_path, "sft", SftConfig)
    assert (section.seed, section.steps, section.optimizer.lr) == (3, 5, 1e-3)


@pytest.mark.parametrize("text", ["sft: [", "- a", "sft: {steps: 3"])
def test_broken_yaml_is_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"params\.yaml"):
        load_section(tmp_path, "sft", SftConfig)


def test_workspace_name_ignores_the_order_of_overrides() -> None:
    assert workspace_name("demo", []) == "demo"
    assert workspace_name("demo", ["a=1", "b=2"]) == workspace_name("demo", ["b=2", "a=1"]) != "demo"


def test_a_pool_may_be_named_alone_or_with_what_the_job_asks_for() -> None:
    asked = {"pool": "cluster", "queue": "long", "gpus": 8, "memory": "512Gi", "variables": {"priority_class": "low"}}
    params = check_params({"pools": {"sft": "cluster", "ppo": asked, "reward": "gpu-pool"}})
    assert params.pools["sft"].pool == "cluster" and params.pools["sft"].job_variables() == {}
    assert params.pools["ppo"].job_variables() == {"gpus": 8, "memory": "512Gi", "priority_class": "low"}
    assert params.pool_names() == ["cluster", "gpu-pool"]


def test_a_pool_takes_one_job_at_a_time_unless_told_otherwise() -> None:
    params = check_params({"work_pools": {"cluster": {"limit": 4}}})
    assert params.pool_limit("cluster") == 4 and params.pool_limit("gpu-pool") == 1

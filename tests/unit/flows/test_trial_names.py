"""The registered models of a trial have names of their own, unless somebody names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT

from flows.commands import init
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(init, "ensure_dvc", lambda *_: None)
    monkeypatch.setattr(init, "cache_of", lambda *_: None)
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def names(workspace: Path) -> tuple[str, str]:
    config = load_section(workspace, "registry", RegistryConfig)
    return config.policy, config.reward_model


def test_a_trial_does_not_use_the_names_of_its_base(base: Path) -> None:
    trial = init.trial_workspace(base, None, ["seed=2"])
    assert trial.name.startswith("demo-")
    assert names(trial) == (f"rlhf-policy-{trial.name}", f"rlhf-reward-model-{trial.name}")
    assert names(base) == ("rlhf-policy", "rlhf-reward-model")


@pytest.mark.slow
def test_gates_of_smoke_do_not_meet_the_models_in_use(base: Path) -> None:
    expected = ("rlhf-policy-smoke", "rlhf-reward-model-smoke")
    assert names(init.trial_workspace(base, "smoke", [])) == expected
    assert names(init.trial_workspace(base, "smoke", ["seed=3"])) == expected
    assert names(init.initialise(base / "other", "smoke", [])) == expected


@pytest.mark.slow
def test_whoever_names_a_model_gets_that_name(base: Path) -> None:
    trial = init.trial_workspace(base, None, ["registry.policy=mine"])
    assert names(trial) == ("mine", f"rlhf-reward-model-{trial.name}")


@pytest.mark.slow
def test_a_trial_that_exists_keeps_its_names_and_so_its_champion(base: Path) -> None:
    trial = init.trial_workspace(base, None, ["seed=2"])
    params = trial / "params.yaml"
    params.write_text(params.read_text().replace(f"policy: rlhf-policy-{trial.name}", "policy: rlhf-policy"))
    assert names(init.trial_workspace(base, None, ["seed=2"]))[0] == "rlhf-policy"

"""Names: of runs on both servers, and of the registered models of a trial."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from commands import ROOT

from flows.commands import init
from flows.workspace import job_label, run_label, run_tags
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig

MOMENT = datetime(2026, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("profile", "label"),
    [
        ("smoke", "trial · smoke · 2026-01-02 03:04:05"),
        ("", "trial · 2026-01-02 03:04:05"),
        ("trial", "trial · 2026-01-02 03:04:05"),
    ],
)
def test_a_run_is_named_by_workspace_profile_and_time(tmp_path: Path, profile: str, label: str) -> None:
    assert run_label(tmp_path / "trial", profile, MOMENT) == label


def test_a_job_is_named_by_workspace_and_stage() -> None:
    assert job_label("/a/b/trial", "ppo") == "trial · ppo"


def test_the_tags_are_what_a_person_looks_for(tmp_path: Path) -> None:
    assert run_tags(tmp_path / "trial", "smoke") == {"workspace": "trial", "profile": "smoke"}
    assert run_tags(tmp_path / "trial", "") == {"workspace": "trial"}


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

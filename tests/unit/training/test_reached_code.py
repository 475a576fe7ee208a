"""Whatever a stage of training executes counts in its fingerprint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from traced import missed
from unit.training import tiny
from unit.training.test_ppo_stages import SETTINGS, context, paths

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.stages import ppo


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward", "critic"])
def test_what_training_executes_is_reached(name: str, workspace: Path) -> None:
    assert missed(name, partial(tiny.run_stage, name, workspace, f"traced-{name}")) == set()


def test_what_ppo_executes_is_reached(workspace: Path) -> None:
    out = workspace / "traced-ppo"
    tiny.run_stage("critic", workspace, "traced-ppo")
    config = PpoConfig.model_validate(SETTINGS | {"iterations": 2})
    assert missed("ppo", lambda: ppo.STAGE.run(config, *paths(ppo, workspace, out), context(ppo, out))) == set()

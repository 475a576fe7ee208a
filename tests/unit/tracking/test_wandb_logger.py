"""Weights & Biases as a run logger, without a server: what a stage reports is in the run's
files.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from commands import ROOT

from rlhf_core.plugins import RUN_LOGGERS
from rlhf_core.tracking.run_loggers import RunLogger, TrackerWithLoggers
from rlhf_core.tracking.stage_run import Tracker

MODULE = "rlhf_extras.wandb_logger"


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'rlhf-pipeline\[wandb\]'"):
        importlib.import_module(MODULE)


def test_a_logger_is_given_the_names_that_mlflow_has(tmp_path: Path) -> None:
    given: dict[str, float] = {}

    class Kept(RunLogger):
        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            given.update(metrics)

    beside = TrackerWithLoggers(Tracker(), {"kept": Kept("ppo", tmp_path)})
    beside.log_metrics({"loss": 1.0, "reward_mean": 2.0, "kl": 3.0}, 1)
    beside.log_metrics({"final/kl": 4.0})
    assert given == {"train/loss": 1.0, "reward/mean": 2.0, "kl/k1": 3.0, "final/kl": 4.0}


@pytest.mark.dear("starts the program that writes W&B's files")
def test_a_stage_is_a_run_of_its_own_that_waits_for_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the optional package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        RUN_LOGGERS
    ]
    module, _, name = entries["wandb"].partition(":")
    made = getattr(importlib.import_module(module), name)
    assert issubclass(made, RunLogger)
    logger = made("sft", tmp_path)
    beside = TrackerWithLoggers(Tracker(), {"wandb": logger})
    beside.log_params({"sft.steps": 3})
    for step, loss in ((1, 2.0), (2, float("nan")), (1, 1.5)):  # it goes on from a checkpoint
        beside.log_metrics({"loss": loss, "tokens": 5.0}, step)
    beside.log_metrics({"final/loss": 1.5})
    beside.set_tags({"rlhf.selection": "last"})
    beside.log_artifact(tmp_path / "samples.jsonl", "samples")
    settings, results = dict(logger.run.config), dict(logger.run.summary)
    beside.end(failed=False)
    assert beside.loggers, "nothing of it failed"
    assert settings == {"sft.steps": 3, "rlhf.selection": "last"} and results["final/loss"] == 1.5
    (folder,) = (tmp_path / ".rlhf" / "wandb" / "wandb").glob("offline-run-*")
    assert any(folder.glob("*.wandb"))

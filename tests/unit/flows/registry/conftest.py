"""A registry on SQLite with versions of a few bytes, used by workspaces that are a params.yaml and
test prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from scripted_match import match_result

from flows.registry.client import prepare_tracking
from flows.registry.promote import short_conditions
from rlhf_core.config.gates import Condition
from rlhf_core.storage.files import sha256_tree

MODEL = "rlhf-policy"
GATES = {
    "sft": (Condition(metric="perplexity", at_most_of="perplexity_before", why=""),),
    "policy": (
        Condition(metric="kl", at_most=6.0, why=""),
        Condition(metric="accuracy", at_least=0.65, why=""),
    ),
}
PARAMS = """
seed: 1
gates:
  policy:
  - {metric: kl, at_most: 6.0, why: test}
  - {metric: accuracy, at_least: 0.65, why: test}
"""
APPROVAL = PARAMS + "registry: {approval: true}\n"


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's schema, made once."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "params.yaml").write_text("seed: 1\n")
    prepare_tracking(folder)
    return folder / "mlflow.db"


@dataclass(frozen=True)
class Registry:
    """One SQLite registry that every workspace of a test uses, as they would use a server."""

    folder: Path
    client: MlflowClient

    def workspace(self, name: str, params: str = PARAMS, prompts: str = "prompts") -> Path:
        """Make another workspace."""
        workspace = self.folder / name
        (workspace / "data/clean/prompts").mkdir(parents=True)
        (workspace / "params.yaml").write_text(params)
        (workspace / "data/clean/prompts/test.parquet").write_text(prompts)
        (workspace / "models/judge").mkdir(parents=True)
        return workspace

    def add_version(
        self, model: str = MODEL, gates: Mapping[str, Any] | None = None, **tags: str
    ) -> str:
        """Register another version that has passed ``gates``, make it the challenger, and return
        its number.
        """
        known = {registered.name for registered in self.client.search_registered_models()}
        if model not in known:
            self.client.create_registered_model(model)
        experiment = self.client.get_experiment_by_name("versions")
        location = (self.folder / "runs").as_uri()
        own = (
            experiment.experiment_id
            if experiment
            else self.client.create_experiment("versions", location)
        )
        run = self.client.create_run(own).info.run_id
        source = self.folder / "artifacts" / run
        (source / "artifacts/hf").mkdir(parents=True)
        (source / "artifacts/hf/config.json").write_text(json.dumps({"made_by": run}))
        passed = {
            "content_sha256": sha256_tree(source / "artifacts/hf"),
            "complete": "true",
            "gates": "passed",
        }
        conditions = {
            "gate_conditions": json.dumps(short_conditions(GATES if gates is None else gates))
        }
        made = self.client.create_model_version(
            model, source.as_uri(), run, tags=passed | conditions | tags
        )
        number = str(made.version)
        self.client.set_registered_model_alias(model, "challenger", number)
        return number

    def aliases(self, model: str = MODEL) -> dict[str, str]:
        """Return version numbers by alias."""
        return {
            alias: str(number)
            for alias, number in self.client.get_registered_model(model).aliases.items()
        }


@pytest.fixture
def registry(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of its own for each test."""
    database = tmp_path / "shared" / "mlflow.db"
    database.parent.mkdir()
    shutil.copy(empty_database, database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    return Registry(tmp_path, MlflowClient(f"sqlite:///{database}"))


class ScriptedMatch:
    """A match with a given lower bound of the win rate and given losses, and how often it was
    played.
    """

    def __init__(self, low: float = 0.6, **losses_high95: float) -> None:
        self.low, self.losses, self.played = low, losses_high95, 0

    def __call__(
        self, workspace: Path, champion: Path, challenger: Path, prompt_set: int
    ) -> dict[str, Any]:
        self.played += 1
        return match_result({"judge": self.low}, **self.losses)


@pytest.fixture
def contest(registry: Registry) -> Path:
    """The workspace that owns version 1, the champion; version 2 is the challenger."""
    from flows.registry.promote import promote

    owner = registry.workspace("owner")
    registry.add_version()
    assert promote(owner).promoted
    registry.add_version()
    return owner

"""A registered model of its own on an MLflow server, whose versions are a few bytes in the server's
artifact store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from mlflow import MlflowClient
from unit.flows.registry.conftest import GATES, PARAMS

from flows.registry.history import DONE_TAG, ReleaseState, read_history
from flows.registry.promote import promote, short_conditions
from rlhf_core.storage.files import atomic_write_json, sha256_tree


@dataclass(frozen=True)
class SmallRegistry:
    """The registered model ``name``; ``folder`` holds the workspaces that use it."""

    folder: Path
    client: MlflowClient
    name: str
    experiment: str

    @classmethod
    def create(cls, folder: Path, uri: str) -> SmallRegistry:
        """Make a registered model and an experiment."""
        client, name = MlflowClient(uri), f"policy-{uuid4().hex[:8]}"
        client.create_registered_model(name)
        return cls(folder, client, name, client.create_experiment(name))

    def workspace(self, name: str) -> Path:
        """Make another workspace."""
        workspace = self.folder / name
        (workspace / "data/clean/prompts").mkdir(parents=True)
        (workspace / "models/judge").mkdir(parents=True)
        (workspace / "data/clean/prompts/test.parquet").write_text("prompts")
        own = f"registry: {{policy: {self.name}}}\ntracking: {{experiment: {self.name}}}\n"
        (workspace / "params.yaml").write_text(PARAMS + own)
        return workspace

    def contested(self) -> Path:
        """Make a workspace that owns version 1, the champion; version 2 is the challenger."""
        owner = self.workspace("owner")
        promote(owner, version=self.add_version())
        self.client.set_registered_model_alias(self.name, "challenger", self.add_version())
        return owner

    def add_version(self) -> str:
        """Register another version that has passed its gates, and return its number."""
        run = self.client.create_run(self.experiment).info.run_id
        model = self.folder / "registered" / run
        atomic_write_json(model / "artifacts/hf/config.json", {"made_by": run})
        self.client.log_artifacts(run, str(model), "model")
        tags = {
            "content_sha256": sha256_tree(model / "artifacts/hf"),
            "complete": "true",
            "gates": "passed",
            "gate_conditions": json.dumps(short_conditions(GATES)),
        }
        return str(
            self.client.create_model_version(
                self.name, f"runs:/{run}/model", run, tags=tags
            ).version
        )

    def champion(self) -> str:
        """The version that is champion."""
        return str(self.client.get_registered_model(self.name).aliases["champion"])

    def consistent_champions(self) -> list[str]:
        """The champions, oldest first, after checking that history, aliases and tags agree on
        them.
        """
        records: list[dict[str, Any]] = [
            record
            for record in read_history(self.client, self.name)
            if record["action"] in ("promote", "rollback")
        ]
        champions = [str(record["history"][-1]) for record in records]
        for before, record in zip(champions, records[1:], strict=False):
            replaced = record["decision"][
                "champion" if record["action"] == "promote" else "replaced"
            ]
            assert replaced == before, "it was decided on the champion of that time"
        assert (
            self.champion()
            == champions[-1]
            == ReleaseState.read(self.client, self.folder, self.name).champion
        )
        assert self.client.get_registered_model(self.name).tags[DONE_TAG] == str(
            len(read_history(self.client, self.name))
        )
        return champions

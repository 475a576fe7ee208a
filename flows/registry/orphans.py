"""What killed registrations and experiments leave: models of no version, runs that never end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.client import experiment_id, registry_errors
from rlhf_core.tracking.origin import known_workspace_id
from rlhf_core.tracking.pipeline_run import abandoned_experiments, end_experiment, open_stages

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run

KINDS = ("policy", "reward")
REGISTERING = "register "  # the names of registration runs begin so
# A registration that began later may be at work, on another machine too, and uploads tens of
# gigabytes.
SECONDS = 6 * 3600.0
PAGE = 50


@dataclass(frozen=True)
class Orphans:
    """Logged models that no version was made of, and runs that nobody has ended.

    Attributes:
        runs: Of registrations.
        experiments: Of DVC experiments.
    """

    models: Sequence[LoggedModel]
    runs: Sequence[Run]
    experiments: Sequence[Run]

    def __bool__(self) -> bool:
        return bool(self.models or self.runs or self.experiments)

    def describe(self) -> str:
        """What there is, in a line."""
        return "; ".join([*self.of_registrations, *self.of_experiments])

    @property
    def of_registrations(self) -> list[str]:
        """What killed registrations have left."""
        if not self.models and not self.runs:
            return []
        models = f"{len(self.models)} model{'s' if len(self.models) != 1 else ''}"
        return [f"killed registrations have left the files of {models} and {_open(self.runs)}"]

    @property
    def of_experiments(self) -> list[str]:
        """What DVC experiments have left that were killed, or ended with another stage."""
        if not self.experiments:
            return []
        left = _open(self.experiments)
        return [f"DVC experiments that ended before their report have left {left}"]


def _open(runs: Sequence[Run]) -> str:
    return f"{len(runs)} open run{'s' if len(runs) != 1 else ''}"


def end_experiments(client: MlflowClient, runs: Sequence[Run]) -> None:
    """End the runs of DVC experiments that are left, and what was killed below them."""
    for run in runs:
        stages = open_stages(client, run)
        for stage in stages:
            client.set_terminated(stage, "KILLED")
        end_experiment(client, run.info.run_id, "KILLED" if stages else "FINISHED")


def find_orphans(client: MlflowClient, workspace: Path) -> Orphans:
    """Find what registrations in the experiment of ``workspace`` have left that began hours ago.

    And what its DVC experiments have left; one with a stage that may be at work only hours later.
    """
    before = int((time.time() - SECONDS) * 1000)
    with registry_errors(client, "look for what killed registrations have left"):
        own = experiment_id(client, workspace)
        models: list[LoggedModel] = []
        token: str | None = None
        while True:
            page = client.search_logged_models([own], max_results=PAGE, page_token=token)
            for model in page:
                is_old = model.name in KINDS and model.creation_timestamp < before
                if is_old and not client.search_model_versions(
                    f"source_path = 'models:/{model.model_id}'"
                ):
                    models.append(model)
            token = page.token
            if not token:
                break
        open_runs = f"attributes.status = 'RUNNING' and attributes.run_name LIKE '{REGISTERING}%'"
        runs = [run for run in client.search_runs([own], open_runs) if run.info.start_time < before]
        experiments = []
        for run in abandoned_experiments(client, own, known_workspace_id(workspace) or ""):
            if run.info.start_time < before or not open_stages(client, run):
                experiments.append(run)
    return Orphans(models, runs, experiments)

"""What a killed registration leaves: model files of no version, and runs that never end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.client import experiment_id, registry_errors

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
    """Logged models that no version was made of, and registration runs that nobody has ended."""

    models: Sequence[LoggedModel]
    runs: Sequence[Run]

    def __bool__(self) -> bool:
        return bool(self.models or self.runs)

    def describe(self) -> str:
        """What there is, in a line."""
        models = f"{len(self.models)} model{'s' if len(self.models) != 1 else ''}"
        runs = f"{len(self.runs)} open run{'s' if len(self.runs) != 1 else ''}"
        return f"killed registrations have left the files of {models} and {runs}"


def find_orphans(client: MlflowClient, workspace: Path) -> Orphans:
    """Find what registrations in the experiment of ``workspace`` have left that began hours ago."""
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
    return Orphans(models, runs)

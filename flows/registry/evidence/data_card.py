"""The data card among the artifacts of the MLflow run that registered a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

DATA_CARD = Path("data/card/release.md")  # without texts of the data; by the folder's name in MLflow


def log_data_card(client: MlflowClient, run_id: str, workspace: Path) -> None:
    """Log the workspace's data card, if there is one."""
    if (workspace / DATA_CARD).is_file():
        client.log_artifact(run_id, str(workspace / DATA_CARD), DATA_CARD.parent.name)


def read_data_card(client: MlflowClient, run_id: str, temporary: Path) -> str:
    """Return the data card that a run has; an empty text if it has none. ``temporary`` receives the file."""
    if all(artifact.path != DATA_CARD.parent.name for artifact in client.list_artifacts(run_id)):
        return ""
    name = f"{DATA_CARD.parent.name}/{DATA_CARD.name}"
    return Path(client.download_artifacts(run_id, name, str(temporary))).read_text(encoding="utf-8")

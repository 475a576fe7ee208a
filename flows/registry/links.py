"""Addresses of pages of the MLflow UI, where one is known to be served."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from flows.workspace.cleanup import running_addresses

MLFLOW_SERVICE = "mlflow"
# Without it the UI shows its pages on generative AI, traces and judges, until one has chosen model training.
MODEL_TRAINING = "?workflowType=machine_learning"


@dataclass(frozen=True)
class MlflowLinks:
    """Pages of the MLflow UI at ``address``."""

    address: str

    def experiment(self, experiment_id: str) -> str:
        """Return the address of the runs of an experiment."""
        return f"{self.address}/#/experiments/{experiment_id}/runs{MODEL_TRAINING}"

    def run(self, experiment_id: str, run_id: str, artifact: str | None = None) -> str:
        """Return the address of a run, or of one of its artifacts."""
        return f"{self.address}/{run_page(experiment_id, run_id, artifact)}"

    @property
    def models(self) -> str:
        """The address of the list of registered models."""
        return f"{self.address}/#/models{MODEL_TRAINING}"

    def model(self, name: str, version: str | None = None) -> str:
        """Return the address of a registered model, or of one of its versions."""
        page = f"{self.address}/#/models/{quote(name, safe='')}"
        return (f"{page}/versions/{version}" if version else page) + MODEL_TRAINING


def run_page(experiment_id: str, run_id: str, artifact: str | None = None) -> str:
    """Return the page of a run, or of one of its artifacts, relative to any other page of the MLflow UI."""
    page = f"#/experiments/{experiment_id}/runs/{run_id}"
    return (f"{page}/artifacts/{quote(artifact)}" if artifact else page) + MODEL_TRAINING


def mlflow_links(workspace: Path) -> MlflowLinks | None:
    """Return the pages of the server of ``MLFLOW_TRACKING_URI``, or of a running ``rlhf up``; None if neither serves.

    A user name and password in the variable are left out.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    if uri:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https"):
            return None
        return MlflowLinks(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/"))
    address = running_addresses(workspace).get(MLFLOW_SERVICE)
    return MlflowLinks(address) if address else None

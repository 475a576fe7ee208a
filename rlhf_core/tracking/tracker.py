"""Where a stage sends its metrics, parameters and files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Where a stage sends its metrics, parameters and files."""

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; empty where there is none, or none yet."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record finite numbers, optionally at a step; non-finite ones are left out."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record settings of the run."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file into the run's artifacts."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Label the run."""


class NullTracker:
    """Discards everything: for library use and for runs with tracking switched off."""

    run_id = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Discard."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Discard."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Discard."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Discard."""

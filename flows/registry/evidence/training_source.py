"""What a model was trained on: the starting model, and the synthetic world or the user's preference data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.mlflow_client import flatten
from rlhf_core.config.loading.yaml_text import plain, read
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import read_json

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

PARENT_TAG = "mlflow.parentRunId"
SOURCE, BASE, FILES = "collect.source", "base.source", "collect.files.preferences"
PAIRS = "preferences.train"  # of the reward model; the referee has others
WORLD, SCRATCH = "world", "scratch"


@dataclass(frozen=True)
class TrainingSource:
    """The data and the starting model behind a policy.

    Attributes:
        collect: ``world`` for the synthetic world, ``files`` for the user's own.
        base: ``scratch``, a folder or a hub id.
        files: The files of preference pairs, as params.yaml names them.
        pairs: How many preference pairs the reward model could train on, None if unknown.
    """

    collect: str
    base: str
    files: str
    pairs: int | None

    @property
    def is_synthetic(self) -> bool:
        """Whether the data are those of the synthetic world."""
        return self.collect == WORLD

    def __str__(self) -> str:
        """``5,998 preference pairs of the synthetic world; base: random weights``."""
        pairs = f"{self.pairs:,} preference pairs" if self.pairs is not None else "preference pairs"
        data = "of the synthetic world" if self.is_synthetic else f"from {self.files or 'files'}"
        return f"{pairs} {data}; base: {'random weights' if self.base == SCRATCH else self.base}"


def source_of_version(client: MlflowClient, version: ModelVersion) -> TrainingSource | None:
    """Read what ``version`` was trained on from the pipeline run that registered it; None if MLflow has no such run."""
    from mlflow.exceptions import MlflowException

    if not version.run_id:
        return None
    try:
        own = client.get_run(version.run_id).data
        parent = client.get_run(own.tags[PARENT_TAG]).data
    except (MlflowException, KeyError):
        return None
    return _source(parent.params, own.metrics.get(f"data.{PAIRS}"))


def source_of_workspace(workspace: Path) -> TrainingSource | None:
    """Read what the models of ``workspace`` were trained on from dvc.lock; None before the first run."""
    lock = workspace / "dvc.lock"
    stages = (plain(read(lock)) if lock.is_file() else {}).get("stages") or {}
    recorded = [stages.get(name, {}).get("params", {}).get("params.yaml", {}) for name in ("collect", "base")]
    try:
        pairs = flatten(read_json(workspace / "metrics" / "data.json")).get(PAIRS)
    except RlhfError:
        pairs = None
    return _source({key: value for params in recorded for key, value in flatten(params).items()}, pairs)


def _source(params: Mapping[str, Any], pairs: float | None) -> TrainingSource | None:
    if not {SOURCE, BASE} <= set(params):
        return None
    files = str(params.get(FILES) or "").strip("[]").replace("'", "")
    return TrainingSource(str(params[SOURCE]), str(params[BASE]), files, None if pairs is None else int(pairs))

"""What MLflow keeps of a registered policy: gates and metrics as they were when it was registered."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.aliases import registry_errors
from flows.registry.client import connect, fluent
from flows.registry.evidence import TrainingSource, read_data_card, source_of_version
from flows.registry.stored_models import stored_sampling
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import read_json

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

LINEAGE = "lineage."


@dataclass(frozen=True)
class ReleaseEvidence:
    """What a model card tells of a version.

    Attributes:
        name: Registered model and version, ``rlhf-policy version 3``.
        run_id: The MLflow run that registered it.
        gates: The gate reports by name, in the order in which they judged.
        evaluation: The content of ``metrics/evaluation.json``.
        sampling: The sampling that the policy was judged with.
        source: What it was trained on; None if MLflow no longer knows.
        lineage: Hashes of code, data and parameters by name.
        obstacle: Why it must not be released without force; empty if nothing stands against.
        data_card: The data card in Markdown, without texts of the data; empty for versions that were registered
            without one.
        method: How the policy was trained, as ``policy.method`` has it.
        fine_tuned: Whether SFT took any step; with ``sft.steps: 0`` the SFT model is the starting model.
    """

    name: str
    run_id: str
    gates: Mapping[str, Mapping[str, Any]]
    evaluation: Mapping[str, Any]
    sampling: Mapping[str, Any]
    source: TrainingSource | None
    lineage: Mapping[str, str]
    obstacle: str
    data_card: str = ""
    method: str = "ppo"
    fine_tuned: bool = True


def release_evidence(workspace: Path, version: ModelVersion, folder: Path, obstacle: str) -> ReleaseEvidence:
    """Read the evidence of ``version`` from the run that registered it.

    Args:
        folder: Its Hugging Face folder, as MLflow stores it.

    Raises:
        RlhfError: The run or its files are gone, or MLflow does not answer.
    """
    name = f"{version.name} version {version.version}"
    if not version.run_id:
        raise RlhfError(f"{name} was registered by no run, so nothing says how it was judged")
    from mlflow.artifacts import download_artifacts

    with (
        tempfile.TemporaryDirectory() as temporary,
        registry_errors(f"read the evidence of {name}"),
        fluent(workspace),
    ):
        local = Path(download_artifacts(run_id=version.run_id, artifact_path="gates", dst_path=temporary))
        gates = {path.stem: read_json(path) for path in local.glob("*.json")}
        metrics = Path(download_artifacts(run_id=version.run_id, artifact_path="metrics", dst_path=temporary))
        evaluation = read_json(metrics / "evaluation.json")
        training = metrics / "ppo.json"
        method = str(read_json(training).get("method", "ppo")) if training.is_file() else "ppo"
        sft = metrics / "sft.json"
        fine_tuned = not sft.is_file() or "train_loss" in read_json(sft)
        data_card = read_data_card(connect(workspace), version.run_id, Path(temporary))
        sampling = stored_sampling(folder)
    order = [gate for gate in ("data", "sft", "reward", "policy") if gate in gates]
    return ReleaseEvidence(
        name=name,
        run_id=version.run_id,
        gates={gate: gates[gate] for gate in [*order, *sorted(set(gates) - set(order))]},
        evaluation=evaluation,
        sampling=sampling,
        source=source_of_version(connect(workspace), version),
        lineage={key.removeprefix(LINEAGE): value for key, value in version.tags.items() if key.startswith(LINEAGE)},
        obstacle=obstacle,
        data_card=data_card,
        method=method,
        fine_tuned=fine_tuned,
    )

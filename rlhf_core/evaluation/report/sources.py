"""What a run has left for the report, and where it comes from: data, settings, code and machine.

Whatever is missing stays missing and is named; nothing is guessed.
"""

from __future__ import annotations

import base64
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_core.config.recipe import recorded_outputs
from rlhf_core.data.schema import read_table
from rlhf_core.errors import DataError
from rlhf_core.gates import GATES, GateDecision
from rlhf_core.storage.files import read_json, sha256_file
from rlhf_core.tracking.origin import recorded_revision
from rlhf_core.tracking.stage_run import PARENT_RUN_VARIABLE
from rlhf_core.training.history import read_history

STAGES = ("data", "sft", "reward", "referee", "judge", "critic", "ppo", "evaluation")
HISTORIES = ("sft", "reward", "referee", "judge", "critic", "ppo")
# The parts that do not run after a failed gate. Their files in the workspace are from an earlier
# run.
BEHIND_GATE = {
    "data": ("sft", "reward", "referee", "judge", "critic", "ppo", "evaluation", "policy"),
    "sft": ("reward", "referee", "judge", "critic", "ppo", "evaluation", "policy"),
    "reward": ("critic", "ppo", "evaluation", "policy"),
}
# Beside the report, in a workspace and among the artifacts of a run.
DATA_CARD = "data/card/card.html"
IMAGE_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}

LOCK = "dvc.lock"

JsonObject = dict[str, Any]


def report_lineage(workspace: Path, own_run: str) -> JsonObject:
    """Return what led to a report.

    Args:
        workspace: The folder with params.yaml.
        own_run: MLflow's id of the stage's own run, if it has one.

    Returns:
        ``git_revision`` of the workspace as :func:`.recorded_revision` has it, "none" outside git;
        ``mlflow_run``, the id of the pipeline's run, else the stage's, empty without tracking;
        ``dvc_lock``, its sha256, empty without one; ``outputs``, the hash by path of what the
        stages wrote, as dvc.lock has it.
    """
    lock = workspace / LOCK
    digest = ""
    outputs = {}
    if lock.is_file():
        digest = sha256_file(lock)
        outputs = recorded_outputs(lock)
    return {
        "git_revision": recorded_revision(workspace),
        "mlflow_run": os.environ.get(PARENT_RUN_VARIABLE) or own_run,
        "dvc_lock": digest,
        "outputs": outputs,
    }


LIBRARIES = ("rlhf-pipeline", "torch", "transformers", "datasets", "peft", "numpy", "scikit-learn")


def package_versions() -> dict[str, str]:
    """Return the version of Python and of each installed library, by name."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True)
class ReportSources:
    """Everything that the report may show.

    Attributes:
        metrics: Content of ``metrics/NAME.json`` by stage.
        gates: The decision of each gate.
        histories: Rows of ``history/NAME.jsonl`` by stage.
        comparisons: Rows of ``samples/comparisons.parquet``.
        bad_cases: Rows of ``samples/bad_cases.jsonl``.
        lineage: Where all of it comes from.
        mistakes: Rows of ``samples/reward_mistakes.jsonl``.
        images: (caption, data URI) of each plot.
        hashes: sha256 by file.
        params: Text of the workspace's params.yaml.
        missing: Why a part is not here, by part.
        data_card: The address of the data card as seen from the report; empty if there is none.
    """

    metrics: dict[str, JsonObject]
    gates: dict[str, GateDecision]
    histories: dict[str, list[JsonObject]]
    comparisons: list[JsonObject]
    bad_cases: list[JsonObject]
    images: list[tuple[str, str]]
    hashes: dict[str, str]
    params: str
    missing: dict[str, str]
    data_card: str
    mistakes: list[JsonObject]
    lineage: JsonObject


def load_sources(inputs: Mapping[str, Path], params: Path, lineage: JsonObject) -> ReportSources:
    """Read all inputs that exist.

    Args:
        inputs: Paths by key: ``NAME_metrics``, ``NAME_gate``, ``NAME_history``, ``comparisons``,
            ``bad_cases``, ``reward_mistakes``, ``reward_plots`` (a folder of images), ``data_card``
            (a folder).
        params: The workspace's params.yaml.
        lineage: See :func:`report_lineage`.
    """
    missing: dict[str, str] = {}
    decisions = _read_objects(inputs, "gate", GATES, {}, missing)
    gates = {name: GateDecision.of(name, content) for name, content in decisions.items()}
    failed = failed_gate(gates)
    stale = dict.fromkeys(BEHIND_GATE.get(failed or "", ()), f"not run: the {failed} gate failed")
    metrics = _read_objects(inputs, "metrics", STAGES, stale, missing)
    for name in set(stale) & set(gates):
        if GATES.index(name) > GATES.index(str(failed)):
            del gates[name]
            missing[f"{name} gate"] = stale[name]

    def rows(name: str, stage: str) -> list[JsonObject]:
        if name in inputs and stage not in stale:
            return read_history(inputs[name])
        return []

    histories = {name: rows(f"{name}_history", name) for name in HISTORIES}
    comparisons: list[JsonObject] = []
    table = inputs.get("comparisons")
    if "evaluation" not in stale and table is not None and table.is_file():
        try:
            comparisons = read_table(table).to_pylist()
        except (DataError, pa.ArrowException) as error:
            missing["comparisons"] = str(error)
    images: list[tuple[str, str]] = []
    if "reward" not in stale:
        images = _read_images(inputs.get("reward_plots"))
    hashes = {}
    for path in inputs.values():
        if path.is_file():
            hashes[f"{path.parent.name}/{path.name}"] = sha256_file(path)
    text = ""
    if params.is_file():
        text = params.read_text(encoding="utf-8")
    data_card = ""
    if "data_card" in inputs and (inputs["data_card"] / Path(DATA_CARD).name).is_file():
        data_card = DATA_CARD
    return ReportSources(
        metrics=metrics,
        gates=gates,
        histories=histories,
        comparisons=comparisons,
        bad_cases=rows("bad_cases", "evaluation"),
        mistakes=rows("reward_mistakes", "reward"),
        images=images,
        hashes=hashes,
        params=text,
        missing=missing,
        lineage=lineage,
        data_card=data_card,
    )


def failed_gate(gates: Mapping[str, GateDecision]) -> str | None:
    """Return the first enforced gate whose conditions failed."""
    return next((name for name in GATES if name in gates and not gates[name].opens), None)


def _read_objects(
    inputs: Mapping[str, Path],
    part: str,
    names: Sequence[str],
    stale: Mapping[str, str],
    missing: dict[str, str],
) -> dict[str, JsonObject]:
    """Read the JSON object of each file; for a file without one ``missing`` gets the reason."""
    objects = {}
    for name in names:
        try:
            objects[name] = _read_object(inputs.get(f"{name}_{part}"), stale.get(name, ""))
        except DataError as error:
            missing[f"{name} {part}"] = str(error)
    return objects


def _read_object(path: Path | None, stale: str) -> JsonObject:
    if path is None:
        raise DataError("not part of this pipeline")
    if stale:
        raise DataError(stale)
    if not path.is_file():
        raise DataError("not there yet")
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path.name} does not hold an object")
    return content


def _read_images(folder: Path | None) -> list[tuple[str, str]]:
    """Return (caption, data URI) of each PNG or SVG in the folder."""
    images: list[tuple[str, str]] = []
    if folder is None or not folder.is_dir():
        return images
    for file in sorted(folder.iterdir()):
        if file.suffix in IMAGE_TYPES:
            content = base64.b64encode(file.read_bytes()).decode()
            uri = f"data:{IMAGE_TYPES[file.suffix]};base64,{content}"
            images.append((file.stem.replace("_", " "), uri))
    return images

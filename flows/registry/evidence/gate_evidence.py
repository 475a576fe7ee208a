"""Proof that gates judged the very files that are about to be registered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.dvc_repo.graph import StageNode, all_before, describe_changes, dvc_status, read_graph
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.stages.gates import Condition, GatesConfig
from rlhf_core.errors import GateFailed
from rlhf_core.gates import weaker_conditions
from rlhf_core.storage.files import read_json, sha256_file

GATES = ("data", "sft", "reward", "policy")
REPORT_MODE = "report"
ALWAYS_CHANGED = "always changed"


@dataclass(frozen=True)
class GateEvidence:
    """What one gate recorded. ``failed`` is empty if it passed, else why it does not vouch for a model."""

    gate: str
    report: Mapping[str, Any]
    failed: str

    @property
    def files(self) -> Sequence[str]:
        """The metric files it judged, relative to the workspace."""
        return tuple(self.report["evidence"])


def read_gate_evidence(workspace: Path, gate: str) -> GateEvidence:
    """The evidence of ``gate``; a gate that only reports (``mode: report``) may have failed.

    Raises :class:`GateFailed` when there is no evidence, when an enforced gate failed, or when a judged file has
    changed since.
    """
    path = workspace / "gates" / f"{gate}.json"
    if not path.is_file():
        raise GateFailed(
            f"gates/{gate}.json does not exist: the {gate} gate has not judged this workspace; run `rlhf run`"
        )
    report: dict[str, Any] = read_json(path)
    evidence = report.get("evidence") or {}
    if not evidence:
        raise GateFailed(f"gates/{gate}.json names no evidence, so it cannot vouch for a model; run `rlhf run` again")
    for name, expected in evidence.items():
        file = workspace / name
        if not file.is_file() or sha256_file(file) != expected:
            raise GateFailed(f"{name} is not the file that the {gate} gate judged; run `rlhf run` to judge it anew")
    failed = _failure(gate, report)
    if failed and report.get("mode") != REPORT_MODE:
        raise GateFailed(failed)
    return GateEvidence(gate, report, failed)


def _failure(gate: str, report: Mapping[str, Any]) -> str:
    conditions = report.get("conditions") or []
    if not conditions:
        return f"the {gate} gate has no conditions, so it cannot vouch for a model"
    failed = [str(condition.get("metric")) for condition in conditions if condition.get("passed") is not True]
    if report.get("passed") is True and not failed:
        return ""
    mode = " (mode: report)" if report.get("mode") == REPORT_MODE else ""
    return f"the {gate} gate did not pass{mode}: {', '.join(failed) or f'see gates/{gate}.json'}"


@dataclass(frozen=True)
class Freshness:
    """What DVC says of the workspace: its stages, and those whose files are not what dvc.lock records."""

    graph: Mapping[str, StageNode]
    stale: Mapping[str, Any]

    @classmethod
    def of(cls, workspace: Path) -> Freshness:
        """Ask DVC; ``RlhfError`` if it cannot answer."""
        return cls(read_graph(workspace), dvc_status(workspace))

    def require(self, stage: str) -> None:
        """``GateFailed`` unless ``stage`` and every stage before it have left their files as dvc.lock records."""
        relevant = {stage} | all_before(self.graph, stage)
        stale = {
            name: changes for name, changes in self.stale.items() if name in relevant and changes != [ALWAYS_CHANGED]
        }
        if not stale:
            return
        details = "; ".join(f"{name}: {describe_changes(changes)}" for name, changes in stale.items())
        raise GateFailed(
            f"the files are not what dvc.lock records ({details}); run `rlhf run` to bring them up to date"
        )


def gate_conditions(workspace: Path) -> dict[str, Sequence[Condition]]:
    """The conditions of each gate by the settings of ``workspace``."""
    config = load_section(workspace, "gates", GatesConfig)
    return {name: getattr(config, name) for name in GATES}


def short_conditions(gates: Mapping[str, Sequence[Condition]]) -> dict[str, list[dict[str, Any]]]:
    """Conditions by gate as JSON, without their reasons and defaults; gates without conditions are left out."""
    return {
        name: [condition.model_dump(mode="json", exclude={"why"}, exclude_defaults=True) for condition in conditions]
        for name, conditions in gates.items()
        if conditions
    }


def weaker_gates(passed: Mapping[str, Any], required: Mapping[str, Sequence[Condition]]) -> list[str]:
    """Say which required conditions are not guaranteed by those that were passed, in a phrase for each gate.

    Args:
        passed: What :func:`short_conditions` made; pydantic's ``ValidationError`` for anything else.
    """
    known = {name: tuple(Condition(**fields, why="") for fields in rows) for name, rows in passed.items()}
    weaker = {name: weaker_conditions(known.get(name, ()), conditions) for name, conditions in required.items()}
    return [
        f"gates.{name} does not require {', '.join(map(str, conditions))}"
        for name, conditions in weaker.items()
        if conditions
    ]

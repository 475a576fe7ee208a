"""What stands against the promotion of a version, by what is recorded of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flows.registry.evidence.gate_evidence import weaker_gates
from flows.registry.transactions.champion_transaction import DECLINED_TAG, ROLLED_BACK_TAG
from flows.registry.versions.model_artifacts import COMPLETE_TAG
from flows.registry.versions.register import CONDITIONS_TAG, GATES_PASSED, GATES_TAG, UNGATED_TAG
from rlhf_core.config.stages.gates import Condition

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


def promotion_obstacle(version: ModelVersion, required: Mapping[str, Sequence[Condition]] | None = None) -> str:
    """Why a version must not be promoted without force, by what is recorded of it; empty if nothing stands against.

    Args:
        required: The conditions by gate that it must have passed, None for whatever its gates required.
    """
    number = f"version {version.version}"
    if version.tags.get(COMPLETE_TAG) != "true":
        return f"{number} is incomplete: its registration was interrupted"
    if version.tags.get(GATES_TAG) != GATES_PASSED:
        return f"{number} is ungated ({version.tags.get(UNGATED_TAG) or 'no record that its gates passed'})"
    if ROLLED_BACK_TAG in version.tags:
        return f"{number} was rolled back ({version.tags[ROLLED_BACK_TAG]})"
    if DECLINED_TAG in version.tags:
        return f"{number} was {version.tags[DECLINED_TAG]}"
    return "" if required is None else _gate_obstacle(version, required)


def _gate_obstacle(version: ModelVersion, required: Mapping[str, Sequence[Condition]]) -> str:
    """Why the conditions that a version has passed are not those that are required: another workspace made it."""
    text = version.tags.get(CONDITIONS_TAG)
    if text is None:
        return f"version {version.version} has no record of its gates' conditions; `rlhf run` registers it again"
    try:
        weaker = weaker_gates(json.loads(text), required)
    except (ValueError, TypeError, AttributeError):
        return f"the conditions of version {version.version} cannot be read; `rlhf run` registers it again"
    return f"version {version.version} has passed weaker gates: {'; '.join(weaker)}" if weaker else ""

"""What stands against the promotion of a version, by what is recorded of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from flows.registry.governance.terms import PromotionTerms, read_conditions
from flows.registry.transactions.champion_transaction import DECLINED_TAG, ROLLED_BACK_TAG
from flows.registry.versions.model_artifacts import COMPLETE_TAG
from flows.registry.versions.register import CONDITIONS_TAG, GATES_PASSED, GATES_TAG, UNGATED_TAG

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


def promotion_obstacle(version: ModelVersion, terms: PromotionTerms | None = None) -> str:
    """Why a version must not be promoted without force, by what is recorded of it; empty if nothing stands against.

    Args:
        terms: What its gates must have required, None for whatever they did.
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
    return "" if terms is None else _gate_obstacle(version, terms)


def _gate_obstacle(version: ModelVersion, terms: PromotionTerms) -> str:
    """Why the conditions that a version has passed are not those that the registered model requires."""
    text = version.tags.get(CONDITIONS_TAG)
    if text is None:
        return f"version {version.version} has no record of its gates' conditions; `rlhf run` registers it again"
    try:
        conditions = read_conditions(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        return f"the conditions of version {version.version} cannot be read; `rlhf run` registers it again"
    weaker = terms.weaker_gates(conditions)
    return f"version {version.version} has passed weaker gates: {'; '.join(weaker)}" if weaker else ""

"""The last steps of a pipeline run: register what passed its gates, let the challenger meet the champion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.registry.decisions import PromotionDecision
from flows.registry.promotion import promote
from flows.registry.register import register
from rlhf_core.config.loading.load import load_params

MATCH_LOG = "match"


@dataclass(frozen=True)
class RegistrationSummary:
    """One line on what was registered and what was refused, and whether there is a policy to promote."""

    message: str
    has_challenger: bool


@task(name="register", task_run_name="register", persist_result=False, cache_policy=NO_CACHE)
def register_task(workspace: Path, run_id: str | None = None) -> RegistrationSummary:
    """Register the models of the workspace that passed their gates."""
    result = register(workspace, run_id)
    has_challenger = result.made_challenger(load_params(workspace).registry.policy)
    return RegistrationSummary(result.describe(), has_challenger)


@task(name="promote", task_run_name="promote", persist_result=False, cache_policy=NO_CACHE)
def promote_task(workspace: Path) -> PromotionDecision:
    """Decide on the challenger and return the decision."""
    return promote(workspace)

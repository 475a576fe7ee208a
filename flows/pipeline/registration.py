"""The last steps of a pipeline run: register what passed its gates, let the challenger meet the champion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.registry.decisions import PromotionDecision
from flows.registry.promote import promote
from flows.registry.register import register
from rlhf_core.config.loading.load import load_params

MATCH_LOG = "match"


@dataclass(frozen=True)
class RegistrationSummary:
    """One line on what was registered and what was refused, and the version of the policy that may be promoted."""

    message: str
    challenger: str | None


@task(name="register", task_run_name="register", persist_result=False, cache_policy=NO_CACHE)
def register_task(workspace: Path, run_id: str | None = None) -> RegistrationSummary:
    """Register the models of the workspace that passed their gates."""
    result = register(workspace, run_id)
    return RegistrationSummary(result.describe(), result.challenger(load_params(workspace).registry.policy))


@task(name="promote", task_run_name="promote", persist_result=False, cache_policy=NO_CACHE)
def promote_task(workspace: Path, version: str) -> PromotionDecision:
    """Decide on the version that this run registered, whatever has become challenger from elsewhere since."""
    return promote(workspace, version=version)

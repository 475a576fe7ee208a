"""Registration and promotion as Prefect knows them: the last tasks of the pipeline, and the flow of a promotion."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE

from flows.registry.approval import follow_request
from flows.registry.decisions import PromotionDecision, as_report
from flows.registry.promote import promote
from flows.registry.register import register
from flows.registry.release_page import try_release_page
from rlhf_core.config.loading.load import load_params, load_section
from rlhf_core.config.operations.operations import RegistryConfig

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


def _run_name() -> str:
    workspace = Path(runtime.flow_run.parameters["workspace"])
    return f"{workspace.name} · promotion · {datetime.now():%Y-%m-%d %H:%M:%S}"


@flow(name="rlhf-promotion", flow_run_name=_run_name, persist_result=False)
def promotion_flow(workspace: str, approval: bool = False) -> dict[str, Any]:
    """Promote the challenger of ``workspace`` if it beats the champion.

    With ``registry.approval``, or ``approval`` here, a challenger that passes is not promoted: the run suspends, which
    ends its process, and ``rlhf approve`` or ``rlhf decline`` completes it.
    """
    folder = Path(workspace).resolve()
    decision = promote(folder, approval=approval)
    get_run_logger().info("version %s against %s: %s", decision.challenger, decision.champion, decision.describe())
    if problem := try_release_page(folder):
        get_run_logger().warning(problem)
    if approval or load_section(folder, "registry", RegistryConfig).approval:
        follow_request(folder, decision)
    return as_report(decision)

"""Promotion as a Prefect flow, suspended until a person has decided where approval is required."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime

from flows.registry.approval import follow_request
from flows.registry.decisions import as_report
from flows.registry.promote import promote
from flows.registry.release_page import try_release_page
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import RegistryConfig


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

"""Promotion as a Prefect flow, with an optional pause for a person's approval."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput

from flows.registry.decisions import as_report
from flows.registry.promotion import decline, promote

APPROVAL_SECONDS = 7 * 24 * 3600


class Approval(RunInput):
    """What the form of a paused run asks for."""

    approve: bool
    reason: str = ""


def _run_name() -> str:
    workspace = Path(runtime.flow_run.parameters["workspace"])
    return f"{workspace.name} · promotion · {datetime.now():%Y-%m-%d %H:%M:%S}"


@flow(name="rlhf-promotion", flow_run_name=_run_name, persist_result=False)
def promotion_flow(workspace: str, approval: bool = False) -> dict[str, Any]:
    """Promote the challenger of ``workspace`` if it beats the champion.

    With ``approval`` the run first decides without acting, then, if it would promote, pauses for up to a week until
    somebody resumes it with an answer; a refusal changes nothing.
    """
    logger = get_run_logger()
    folder = Path(workspace)
    if approval:
        plan = promote(folder, dry_run=True)
        logger.info("version %s against %s: %s", plan.challenger, plan.champion, plan.reason)
        if plan.promoted:
            answer = pause_flow_run(wait_for_input=Approval, timeout=APPROVAL_SECONDS)
            if not answer.approve:
                return as_report(decline(folder, plan, answer.reason))
        decision = promote(folder, expected=plan.challenger)
    else:
        decision = promote(folder)
    logger.info("%s: %s", "promoted" if decision.promoted else "not promoted", decision.reason)
    return as_report(decision)

"""The automation that marks flow runs without a heartbeat as Crashed, which frees their pool slots."""

from __future__ import annotations

from datetime import timedelta

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

ZOMBIES = "rlhf: runs without a heartbeat have crashed"
HEARTBEAT = "prefect.flow-run.heartbeat"
FINAL_EVENTS = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}


def zombie_automation(within: timedelta = timedelta(seconds=90)) -> AutomationCore:
    """Define the automation: a run that sent heartbeats, then neither one nor an end ``within`` that time, crashed."""
    message = f"no heartbeat for {within.total_seconds():.0f} s"
    return AutomationCore(
        name=ZOMBIES,
        description="Frees the pool slots of runs whose worker and process were both killed.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *FINAL_EVENTS},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=message, force=False)],
    )


def ensure_zombie_automation() -> None:
    """Create :func:`zombie_automation` on the server unless it exists."""
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(ZOMBIES):
            client.create_automation(zombie_automation())


def try_zombie_automation() -> bool:
    """Try to create :func:`zombie_automation`; return False where the server accepts no automations."""
    try:
        ensure_zombie_automation()
    except httpx.HTTPStatusError:
        return False
    return True

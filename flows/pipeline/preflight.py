"""Checks of what can be known before it is computed: the starting model, and whether a stage fits its pool's GPUs."""

from __future__ import annotations

import time
from pathlib import Path

from flows.dvc_repo.graph import dvc_status
from flows.stage.outcome import StageOutcome
from flows.supervision.processes import run_module
from rlhf_core.config.loading.load import Params, load_params
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError

SCRATCH, BASE = "scratch", "base"


def open_starting_model(workspace: Path, params: Params) -> str:
    """Open the model that the stage ``base`` will load, before other stages take their time; return what is said of it.

    Nothing is opened for a model made from nothing, where ``base`` is up to date, or where it runs on another host.

    Raises:
        RlhfError: ``base`` would refuse the model.
    """
    placement = params.pools.get(BASE)
    if params.base.source == SCRATCH or (placement is not None and not placement.shared):
        return ""
    if (workspace / "models" / BASE).is_dir() and _is_up_to_date(workspace, BASE):
        return ""
    result = run_module(workspace, "flows.cli", "open-model", "--workspace", str(workspace))
    if result.exit_code == EXIT_USER_ERROR:
        raise RlhfError(result.error_line.removeprefix("rlhf: "))
    return result.stdout.strip()


def memory_refusal(workspace: Path, stage: str) -> StageOutcome | None:
    """Return a failed outcome if ``rlhf plan --check`` finds the stage too large, None if it may be submitted.

    Nothing is checked where ``plan.gpu_memory_gb`` is not set, and a stage that is up to date is never refused.
    """
    # DVC's answer takes half a second, the plan ten.
    if load_params(workspace).plan.gpu_memory_gb is None or _is_up_to_date(workspace, stage):
        return None
    started = time.time()
    arguments = ("plan", "--check", "--stage", stage, "--workspace", str(workspace))
    result = run_module(workspace, "flows.cli", *arguments)
    if result.exit_code != EXIT_USER_ERROR:
        return None
    message = result.error_line.removeprefix("rlhf: ")
    return StageOutcome.failed(stage, message, EXIT_USER_ERROR, started=started)


def _is_up_to_date(workspace: Path, stage: str) -> bool:
    try:
        return not dvc_status(workspace, [stage])
    except RlhfError:
        return False

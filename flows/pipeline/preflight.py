"""The check before a job is submitted: can its stage fit the GPUs of its pool at all?"""

from __future__ import annotations

import time
from pathlib import Path

from flows.dvc_repo.status import dvc_status
from flows.stage.outcome import StageOutcome
from flows.supervision.python_module import run_module
from rlhf_core.config.loading.load import load_params
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError


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

"""Before a job is submitted: can its stage fit the GPUs of its pool at all?"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from flows.dvc_repo.status import dvc_status
from flows.stage.outcome import StageOutcome
from flows.supervision.environment import child_environment
from rlhf_core.config.loading.load import load_params
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError


def memory_refusal(workspace: Path, stage: str) -> StageOutcome | None:
    """The failed outcome of a stage that `rlhf plan --check` knows to be too large; None where it may be submitted.

    Nothing is asked where ``plan.gpu_memory_gb`` is not set, and a stage that is up to date needs no memory.
    """
    if load_params(workspace).plan.gpu_memory_gb is None:
        return None
    started = time.time()
    answer = subprocess.run(
        [sys.executable, "-m", "flows.cli", "plan", "--check", "--stage", stage, "--workspace", str(workspace)],
        cwd=workspace,
        env=child_environment(workspace),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if answer.returncode != EXIT_USER_ERROR or _up_to_date(workspace, stage):
        return None
    message = answer.stderr.strip().rpartition("\n")[2].removeprefix("rlhf: ")
    return StageOutcome(stage, "failed", EXIT_USER_ERROR, message, started, time.time(), 0.0)


def _up_to_date(workspace: Path, stage: str) -> bool:
    try:
        return not dvc_status(workspace, [stage])
    except RlhfError:
        return False

"""One job: its workspace made or refreshed, then ``dvc repro`` under the guard. DVC alone decides what is to do."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.ablation.plan import TRAINER, AblationJob, AblationPlan
from flows.dvc_repo.root import ensure_dvc
from flows.stage.outcome import FINAL_CODES, OUTCOMES
from flows.stage.run import wait_for
from flows.supervision.clock import Stopwatch
from flows.supervision.environment import child_environment
from flows.supervision.processes import start_supervised
from flows.supervision.signals import STOP
from flows.workspace.cleanup import cleanup
from flows.workspace.folder import PRIVATE, private_path
from flows.workspace.lock import locked
from flows.workspace.recipe import recipe, write_recipe
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_TRAINING_PAUSED, RlhfError

GRACE_SECONDS = 5.0
ATTEMPTS = 2  # a crash is tried once more; a verdict of a stage is not


@dataclass(frozen=True)
class JobResult:
    """How a job ended. ``state`` is done, paused (a training stage stopped in good order), failed, skipped or stopped;
    ``trained`` says whether PPO ran in it, ``seconds`` is its time."""

    job: AblationJob
    state: str
    message: str = ""
    seconds: float = 0.0
    trained: bool = False

    @property
    def ok(self) -> bool:
        """Whether all that the job makes is there and up to date."""
        return self.state == "done"


def run_job(plan: AblationPlan, job: AblationJob, cache: Path) -> JobResult:
    """Bring the job's targets up to date; never raises for a failing stage. A raised stop flag ends it."""
    watch = Stopwatch()
    try:
        with locked(job.workspace):
            prepare(plan, job, cache)
            cleanup(job.workspace)
            for _ in range(ATTEMPTS):
                ended = _reproduce(job, watch)
                if ended.state != "crashed":
                    return ended
            return JobResult(job, "failed", ended.message, ended.seconds, ended.trained)
    except RlhfError as error:
        return JobResult(job, "failed", str(error), watch.seconds)


def prepare(plan: AblationPlan, job: AblationJob, cache: Path) -> None:
    """The job's workspace with its recipe, on the cache that all share."""
    write_recipe(job.workspace, recipe(plan.base, plan.profile, job.sets, job.workspace), plan.base)
    donor = next(other.workspace for other in plan.jobs if other.variant is None and other.seed == job.seed)
    if donor != job.workspace and (donor / ".dvc" / "config").is_file():
        _copy_dvc(donor, job.workspace)
    ensure_dvc(job.workspace, cache)


def _copy_dvc(donor: Path, target: Path) -> None:
    """The settings of a DVC root like ``donor``: what ``dvc init`` would write, in no time."""
    if (target / ".dvc" / "config").is_file():
        return
    building = target / f".dvc.part-{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    for name in ("config.local", "config"):
        if (donor / ".dvc" / name).is_file():
            shutil.copyfile(donor / ".dvc" / name, building / name)
    shutil.rmtree(target / ".dvc", ignore_errors=True)
    building.rename(target / ".dvc")


def _reproduce(job: AblationJob, watch: Stopwatch) -> JobResult:
    log = private_path(job.workspace, "logs", "ablation.log")
    offset = log.stat().st_size if log.exists() else 0
    _forget_verdicts(job.workspace)
    supervised = start_supervised(
        [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *job.targets],
        name=job.title,
        cwd=job.workspace,
        env=child_environment(job.workspace, **tracking()),
        log=log,
        grace=GRACE_SECONDS,
    )
    code = wait_for(supervised)
    text = log.read_bytes()[offset:].decode("utf-8", errors="replace")
    trained = f"Running stage '{TRAINER}'" in text
    state, message = ("done", "") if code == 0 else _failure(job.workspace, code, text)
    return JobResult(job, state, message, watch.seconds, trained)


def tracking() -> dict[str, str]:
    """A hundred workspaces with an MLflow file each help nobody: a server that is named gets the runs, else nobody."""
    return {} if os.environ.get("MLFLOW_TRACKING_URI") else {"RLHF_TRACKING": "off"}


def _failure(workspace: Path, code: int, text: str) -> tuple[str, str]:
    """State and message of an end that was no success: a stage's own words, else DVC's."""
    if STOP.is_set():
        return "stopped", ""
    for report in _verdicts(workspace):
        exit_code, message = (
            int(report.get("exit_code", 0)),
            f"{report.get('stage')}: {report.get('message', '')}",
        )
        if exit_code == EXIT_TRAINING_PAUSED:
            return "paused", message
        if exit_code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):  # somebody else's signal
            return "crashed", message
        if exit_code:
            return ("failed" if exit_code in FINAL_CODES else "crashed"), message
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
    return "crashed", errors[-1] if errors else f"dvc ended with status {code}"


def _forget_verdicts(workspace: Path) -> None:
    for path in (workspace / PRIVATE / OUTCOMES).glob("*.json"):
        path.unlink(missing_ok=True)


def _verdicts(workspace: Path) -> list[dict[str, Any]]:
    """What stages said of themselves since :func:`_forget_verdicts`."""
    found = []
    for path in (workspace / PRIVATE / OUTCOMES).glob("*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found

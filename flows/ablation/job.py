"""One job of an ablation: prepare its workspace and run ``dvc repro`` there, which runs only what is not up to date."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flows.ablation.plan import TRAINER, AblationJob, AblationPlan
from flows.dvc_repo.recipe import merged_params, write_recipe
from flows.dvc_repo.root import ensure_dvc
from flows.stage.outcome import FINAL_CODES, StageReport, clear_reports, load_reports
from flows.supervision.processes import child_environment, dvc_errors, run_supervised
from flows.supervision.signals import STOP, Stopwatch
from flows.workspace.cleanup import cleanup
from flows.workspace.folder import private_path
from flows.workspace.lock import locked
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_TRAINING_PAUSED, RlhfError

GRACE_SECONDS = 5.0
ATTEMPTS = 2  # a crash is tried once more, a decision of a stage is not

JobState = Literal["done", "paused", "failed", "crashed", "skipped", "stopped"]


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        state: ``paused`` when a training stage stopped itself in good order, ``crashed`` when it may be tried again.
        seconds: the time the job took.
        trained: whether PPO ran in it.
    """

    job: AblationJob
    state: JobState
    message: str = ""
    seconds: float = 0.0
    trained: bool = False

    @property
    def ok(self) -> bool:
        """Whether the targets of the job are up to date."""
        return self.state == "done"


def run_job(plan: AblationPlan, job: AblationJob, cache: Path) -> JobResult:
    """Bring the job's targets up to date; a failing stage does not raise. A raised stop flag stops the job."""
    watch = Stopwatch()
    try:
        with locked(job.workspace):
            prepare(plan, job, cache)
            cleanup(job.workspace)
            for _ in range(ATTEMPTS):
                result = _reproduce(job, watch)
                if result.state != "crashed":
                    return result
            return JobResult(job, "failed", result.message, result.seconds, result.trained)
    except RlhfError as error:
        return JobResult(job, "failed", str(error), watch.seconds)


def prepare(plan: AblationPlan, job: AblationJob, cache: Path) -> None:
    """Write the job's recipe into its workspace and make that a DVC root with the shared cache."""
    write_recipe(job.workspace, merged_params(plan.base, plan.profile, job.sets, job.workspace), plan.base)
    shared = next(other.workspace for other in plan.jobs if other.variant is None and other.seed == job.seed)
    if shared != job.workspace and (shared / ".dvc" / "config").is_file():
        _copy_dvc_root(shared, job.workspace)
    ensure_dvc(job.workspace, cache)


def _copy_dvc_root(source: Path, target: Path) -> None:
    """Copy the settings of a DVC root, which is much faster than ``dvc init``."""
    if (target / ".dvc" / "config").is_file():
        return
    incomplete = target / f".dvc.part-{os.getpid()}"
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir()
    for name in ("config.local", "config"):
        if (source / ".dvc" / name).is_file():
            shutil.copyfile(source / ".dvc" / name, incomplete / name)
    shutil.rmtree(target / ".dvc", ignore_errors=True)
    incomplete.rename(target / ".dvc")


def _reproduce(job: AblationJob, watch: Stopwatch) -> JobResult:
    clear_reports(job.workspace)
    # Stages record to MLflow only where a server is named: hundreds of workspaces with a database each help nobody.
    tracking = {} if os.environ.get("MLFLOW_TRACKING_URI") else {"RLHF_TRACKING": "off"}
    result = run_supervised(
        [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *job.targets],
        name=job.title,
        cwd=job.workspace,
        env=child_environment(job.workspace, **tracking),
        log=private_path(job.workspace, "logs", "ablation.log"),
        grace=GRACE_SECONDS,
    )
    trained = f"Running stage '{TRAINER}'" in result.output
    if result.exit_code == 0:
        return JobResult(job, "done", "", watch.seconds, trained)
    if STOP.is_set():
        return JobResult(job, "stopped", "", watch.seconds, trained)
    report = next((report for report in load_reports(job.workspace) if report.exit_code), None)
    if report is None:
        message = [f"dvc exited with status {result.exit_code}", *dvc_errors(result.output)][-1]
        return JobResult(job, "crashed", message, watch.seconds, trained)
    return JobResult(job, _state(report), f"{report.stage}: {report.message}", watch.seconds, trained)


def _state(report: StageReport) -> JobState:
    """Return the state of a job whose stage failed with ``report``."""
    if report.exit_code == EXIT_TRAINING_PAUSED:
        return "paused"
    if report.exit_code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):  # by a signal from outside, not by this run
        return "crashed"
    return "failed" if report.exit_code in FINAL_CODES else "crashed"

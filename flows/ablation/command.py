"""``rlhf ablate``: check the request, run what is not up to date, write the results."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.ablation.job import JobResult, run_job
from flows.ablation.plan import AblationPlan, AblationRequest, definition, describe, make_plan
from flows.ablation.scheduler import run_jobs
from flows.dvc_repo.root import cache_of, ensure_dvc
from flows.supervision import signals
from flows.supervision.signals import Stopwatch
from flows.workspace.folder import display_path
from flows.workspace.lock import locked
from rlhf_core.errors import EXIT_INTERRUPTED, DataError, RlhfError

LOCK = "ablation.lock"
PAGE = Path("docs") / "ablation.md"
REASON_LENGTH = 300


@dataclass(frozen=True)
class AblationOptions:
    """How to run an ablation: ``jobs`` side by side (None: one per core), and whether to write ``docs/ablation.md``."""

    jobs: int | None = None
    docs: bool = False


class ProgressLines:
    """Prints a line at the end of each job, with an estimate of the remaining time."""

    def __init__(self, count: int, slots: int) -> None:
        self.count, self.slots, self.watch = count, slots, Stopwatch()
        self.ended = 0
        self.training_seconds: list[float] = []

    def job_ended(self, result: JobResult) -> None:
        """Print how a job ended."""
        self.ended += 1
        if result.trained:
            self.training_seconds.append(result.seconds)
        done = "trained" if result.trained else "up to date" if result.job.variant else "done"
        verdict = done if result.ok else result.state
        reason = f": {' '.join(result.message.split())[:REASON_LENGTH]}" if result.message else ""
        remaining = ""
        if self.training_seconds and self.ended < self.count:
            mean = sum(self.training_seconds) / len(self.training_seconds)
            minutes = (self.count - self.ended) * mean / self.slots / 60
            remaining = f"; about {max(minutes, 1):.0f} min to go"
        self.line(f"{self.ended}/{self.count} {result.job.title}: {verdict}, {result.seconds:.0f} s{reason}{remaining}")

    def line(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{self.watch.seconds:7.1f} s] {text}", flush=True)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def listing(base: Path, request: AblationRequest) -> str:
    """Describe the variants and figures of the request without running anything."""
    return describe(definition(base, request), request.variants)


def ablate(base: Path, request: AblationRequest, options: AblationOptions) -> int:
    """Run what the request names and write the results.

    Returns:
        The exit status: 0 when every run is done; 1 when some failed or were paused by their own training, in which
        case the results have the others; 130 when it was stopped, and the next call resumes.

    Raises:
        RlhfError: the request is wrong; nothing has been run.
    """
    signals.install()
    ablation = definition(base, request)
    page = base / PAGE if options.docs else None
    if page is not None:
        if request.is_part_of(ablation):
            raise RlhfError("--docs takes the whole ablation; leave out --variants and --seeds")
        _check_page(page)
    with locked(base, LOCK):
        ensure_dvc(base)
        plan, cache = make_plan(base, request, ablation), cache_of(base)
        slots = options.jobs or cores()
        progress = ProgressLines(len(plan.jobs), slots)
        folder = display_path(plan.jobs[0].workspace.parents[1])
        progress.line(f"{len(plan.jobs)} jobs, {slots} at a time, in {folder}")
        results = run_jobs(plan.jobs, slots, lambda job: run_job(plan, job, cache), progress.job_ended)
        if signals.STOP.is_set():
            print("stopped; the next `rlhf ablate` resumes from here", file=sys.stderr)
            return EXIT_INTERRUPTED
        verdicts = _write_results(plan, results, page)
        unfinished = sum(not result.ok for result in results)
        progress.line(f"{len(results) - unfinished} of {len(results)} jobs done; claims: {verdicts or 'none'}")
        print(f"table:   {display_path(plan.folder / 'table.md')}")
        print(f"results: {display_path(plan.folder / 'results.csv')}")
        if page is not None:
            print(f"page:    {display_path(page)}")
        return 1 if unfinished else 0


def _check_page(page: Path) -> None:
    """Raise ``DataError`` unless ``page`` exists and has the markers between which an ablation's results go."""
    from rlhf_core.evaluation.ablation.page import insert

    if not page.is_file():
        raise DataError(f"{page} does not exist; --docs writes into that page of the workspace")
    insert(page.read_text(encoding="utf-8"), "", str(page))


def _write_results(plan: AblationPlan, results: Sequence[JobResult], page: Path | None) -> str:
    """Write table, figures and verdicts; return how many claims came to which verdict."""
    from rlhf_core.evaluation.ablation.results import AblationRun
    from rlhf_core.evaluation.ablation.summary import summarise

    runs = [
        AblationRun(result.job.variant, result.job.seed, result.job.workspace, result.state, result.message)
        for result in results
        if result.job.variant
    ]
    verdicts = summarise(plan.ablation, runs, plan.folder, page)
    counts = Counter(str(verdict.outcome) for figure in verdicts.values() for verdict in figure)
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))

"""``rlhf ablate``: check everything, run what is not up to date, write the results."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from flows.ablation.job import JobResult, run_job
from flows.ablation.plan import AblationPlan, AblationRequest, definition, describe, make_plan
from flows.ablation.pool import run_jobs
from flows.dvc_repo.root import cache_of, ensure_dvc
from flows.supervision import signals
from flows.supervision.clock import Stopwatch
from flows.workspace.folder import show_path
from flows.workspace.lock import locked
from rlhf_core.cli import require_ablation_page, summarise_ablation
from rlhf_core.errors import EXIT_INTERRUPTED, RlhfError

LOCK = "ablation.lock"
PAGE = Path("docs") / "ablation.md"


@dataclass(frozen=True)
class AblationOptions:
    """How to run. ``jobs`` None: as many side by side as there are cores for this process."""

    jobs: int | None = None
    docs: bool = False


class ProgressLines:
    """A line per end, with how many there are to go and about how long that takes."""

    def __init__(self, count: int, slots: int) -> None:
        self.count, self.slots, self.watch = count, slots, Stopwatch()
        self.done = 0
        self.seconds: list[float] = []

    def __call__(self, ended: JobResult) -> None:
        """Tell of one end."""
        self.done += 1
        if ended.trained:
            self.seconds.append(ended.seconds)
        done = "trained" if ended.trained else "up to date" if ended.job.variant else "done"
        words = done if ended.ok else ended.state
        reason = f": {' '.join(ended.message.split())[:300]}" if ended.message else ""
        self.line(f"{self.done}/{self.count} {ended.job.title}: {words}, {ended.seconds:.0f} s{reason}{self._left()}")

    def line(self, text: str) -> None:
        """One line with the time since the start."""
        print(f"[{self.watch.seconds:7.1f} s] {text}", flush=True)

    def _left(self) -> str:
        if not self.seconds or self.done == self.count:
            return ""
        left = (self.count - self.done) * sum(self.seconds) / len(self.seconds) / self.slots
        return f"; about {max(left / 60, 1):.0f} min to go"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def listing(base: Path, request: AblationRequest) -> str:
    """The variants and figures of the request, nothing run."""
    return describe(definition(base, request), request.variants)


def ablate(base: Path, request: AblationRequest, options: AblationOptions) -> int:
    """Run what the request names and write the results; the exit status. ``RlhfError`` before anything has begun.

    0: every run is done. 1: some failed or were paused by their own training, and the rest is in the results.
    130: stopped; the next call goes on from there.
    """
    signals.install()
    ablation = definition(base, request)
    page = base / PAGE if options.docs else None
    if page is not None:
        if request.is_part_of(ablation):
            raise RlhfError("--docs takes the whole ablation; leave out --variants and --seeds")
        require_ablation_page(page)
    with locked(base, LOCK):
        ensure_dvc(base)
        plan, cache = make_plan(base, request, ablation), cache_of(base)
        slots = options.jobs or cores()
        told = ProgressLines(len(plan.jobs), slots)
        told.line(f"{len(plan.jobs)} jobs, {slots} at a time, in {show_path(plan.jobs[0].workspace.parents[1])}")
        ended = run_jobs(plan.jobs, slots, lambda job: run_job(plan, job, cache), told)
        if signals.STOP.is_set():
            print("stopped; the next `rlhf ablate` goes on from here", file=sys.stderr)
            return EXIT_INTERRUPTED
        return _conclude(plan, ended, page, told)


def _conclude(plan: AblationPlan, ended: list[JobResult], page: Path | None, told: ProgressLines) -> int:
    runs = [(e.job.variant, e.job.seed, e.job.workspace, e.state, e.message) for e in ended if e.job.variant]
    counts = summarise_ablation(plan.ablation, runs, plan.folder, page)
    unfinished = sum(not e.ok for e in ended)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    told.line(f"{len(ended) - unfinished} of {len(ended)} jobs done; claims: {outcomes or 'none'}")
    print(f"table:   {show_path(plan.folder / 'table.md')}")
    print(f"results: {show_path(plan.folder / 'results.csv')}")
    if page is not None:
        print(f"page:    {show_path(page)}")
    return 1 if unfinished else 0

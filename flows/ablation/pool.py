"""Runs jobs side by side: what a seed's variants share first, then the variants, at most so many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from flows.ablation.job import JobResult
from flows.ablation.plan import AblationJob
from flows.supervision.signals import STOP

TICK_SECONDS = 0.2


def run_jobs(
    jobs: Sequence[AblationJob], slots: int, run: Callable[[AblationJob], JobResult], tell: Callable[[JobResult], None]
) -> list[JobResult]:
    """How every job ended, in the order of ``jobs``. ``tell`` hears of each end as it comes.

    A variant waits for the shared part of its seed and is skipped when that fails; other seeds go on. A raised stop
    flag starts nothing more, and what runs sees the flag itself.
    """
    ended: dict[AblationJob, JobResult] = {}
    waiting, running = list(jobs), dict[Future[JobResult], AblationJob]()
    with ThreadPoolExecutor(max_workers=slots) as threads:
        while waiting or running:
            for job in _ready(waiting, ended, slots - len(running)):
                waiting.remove(job)
                blocked = _blocked(job, ended)
                if blocked:
                    ended[job] = blocked
                    tell(blocked)
                else:
                    running[threads.submit(run, job)] = job
            done = wait(running, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED).done if running else set()
            for future in done:
                result = future.result()
                ended[running.pop(future)] = result
                tell(result)
    return [ended[job] for job in jobs]


def _ready(waiting: Sequence[AblationJob], ended: dict[AblationJob, JobResult], free: int) -> list[AblationJob]:
    """Jobs that can be decided on now: those whose shared part has ended, as many as there are free slots."""
    if STOP.is_set():
        return list(waiting)
    shared = {job.seed for job in ended if job.variant is None}
    return [job for job in waiting if job.variant is None or job.seed in shared][: max(free, 0)]


def _blocked(job: AblationJob, ended: dict[AblationJob, JobResult]) -> JobResult | None:
    """The end of a job that must not start, else None."""
    if STOP.is_set():
        return JobResult(job, "stopped")
    for before in ended.values():
        if before.job.variant is None and before.job.seed == job.seed and not before.ok:
            return JobResult(job, "skipped", f"{before.job.title}: {before.message}")
    return None

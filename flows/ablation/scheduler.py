"""Runs the jobs of an ablation side by side: first what the variants of a seed share, then the variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from flows.ablation.job import JobResult
from flows.ablation.plan import AblationJob
from flows.supervision.signals import STOP

POLL_SECONDS = 0.2


def run_jobs(
    jobs: Sequence[AblationJob],
    slots: int,
    run: Callable[[AblationJob], JobResult],
    on_end: Callable[[JobResult], None],
) -> list[JobResult]:
    """Run all jobs, at most ``slots`` at a time, and return their results in the order of ``jobs``.

    A variant waits for the shared part of its seed and is skipped if that fails; other seeds continue. Once the stop
    flag is raised nothing more is started; running jobs check the flag themselves.

    Args:
        on_end: given each result as soon as it is there.
    """
    results: dict[AblationJob, JobResult] = {}
    waiting, running = list(jobs), dict[Future[JobResult], AblationJob]()
    with ThreadPoolExecutor(max_workers=slots) as threads:
        while waiting or running:
            for job in _ready(waiting, results, slots - len(running)):
                waiting.remove(job)
                not_run = _result_without_running(job, results)
                if not_run:
                    results[job] = not_run
                    on_end(not_run)
                else:
                    running[threads.submit(run, job)] = job
            done = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done if running else set()
            for future in done:
                result = future.result()
                results[running.pop(future)] = result
                on_end(result)
    return [results[job] for job in jobs]


def _ready(
    waiting: Sequence[AblationJob], results: Mapping[AblationJob, JobResult], free_slots: int
) -> list[AblationJob]:
    """Return the jobs whose shared part has ended, as many as there are free slots; all of them after a stop."""
    if STOP.is_set():
        return list(waiting)
    shared_done = {job.seed for job in results if job.variant is None}
    return [job for job in waiting if job.variant is None or job.seed in shared_done][: max(free_slots, 0)]


def _result_without_running(job: AblationJob, results: Mapping[AblationJob, JobResult]) -> JobResult | None:
    """Return the result of a job that must not be started, None if it may."""
    if STOP.is_set():
        return JobResult(job, "stopped")
    for earlier in results.values():
        if earlier.job.variant is None and earlier.job.seed == job.seed and not earlier.ok:
            return JobResult(job, "skipped", f"{earlier.job.title}: {earlier.message}")
    return None

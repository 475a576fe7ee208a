"""Running an ablation: variants of the recipe for several seeds, each a workspace that DVC keeps up
to date.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ablation.definition import ABLATION_FILE, Ablation, check_recipes, load_ablation
from benchmarks.ablation.page import summarise
from benchmarks.ablation.verdicts import DONE, SHARED, AblationRun, RunState
from flows.dvc_repo.graph import read_graph
from flows.dvc_repo.inputs import refresh_inputs
from flows.dvc_repo.recipe import TRIALS, merged_params, write_recipe
from flows.dvc_repo.root import cache_of, ensure_dvc
from flows.stage import FINAL_CODES, load_report
from flows.supervision import signals
from flows.supervision.processes import child_environment, dvc_errors, start_supervised
from flows.supervision.signals import STOP, Stopwatch
from flows.workspace import cleanup, display_path, locked, private_path
from rlhf_core.config import yaml_text
from rlhf_core.config.loading import PARAMS_FILE
from rlhf_core.config.profiles import (
    DEFAULT_PROFILE,
    merge,
    overlays_of,
    parse_assignment,
    workspace_name,
)
from rlhf_core.config.recipe import profiles_of
from rlhf_core.errors import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_TRAINING_PAUSED,
    ConfigError,
    RlhfError,
)
from rlhf_core.stages.runtime.launcher import OUTCOMES

FOLDER = "ablation"
TRAINER, GOAL = "ppo", "evaluate"


@dataclass(frozen=True)
class AblationRequest:
    """What the command line asks for; empty ``variants`` or ``seeds`` mean all of the file's."""

    profile: str | None = None
    sets: tuple[str, ...] = ()
    file: Path | None = None
    variants: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The folder name of this ablation: the same for the same profile and overrides."""
        return workspace_name(self.profile or DEFAULT_PROFILE, self.sets)

    def includes(self, run: AblationRun) -> bool:
        """Whether a run is of the variants and seeds that are asked for."""
        return (not self.variants or run.variant in self.variants) and (
            not self.seeds or run.seed in self.seeds
        )

    def is_part_of(self, ablation: Ablation) -> bool:
        """Whether variants or seeds of the file are left out; results of a part never replace those
        of the whole.
        """
        return bool(self.variants) or bool(self.seeds and set(ablation.seeds) - set(self.seeds))


@dataclass(frozen=True)
class AblationJob:
    """Stages (``targets``) to bring up to date in ``workspace``, whose recipe is that of the base
    with ``sets``.

    The job without a variant is the part that all variants of the seed share.
    """

    variant: str | None
    seed: int
    workspace: Path
    sets: tuple[str, ...]
    targets: tuple[str, ...]

    def ended(
        self, state: RunState, message: str = "", seconds: float = 0.0, trained: bool = False
    ) -> AblationRun:
        """Return how the job has run."""
        return AblationRun(
            self.variant or SHARED, self.seed, self.workspace, state, message, seconds, trained
        )


def parse_names(text: str | None) -> tuple[str, ...]:
    """Split ``a,b`` into names."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def parse_seeds(text: str | None) -> tuple[int, ...]:
    """Split ``1,2`` into whole numbers without duplicates; raise ``ConfigError`` for anything
    else.
    """
    names = parse_names(text)
    if wrong := [name for name in names if not name.isdecimal()]:
        raise ConfigError(
            f"--seeds {text}: '{wrong[0]}' is not a seed; write whole numbers, such as --seeds 1,2,3"
        )
    return tuple(dict.fromkeys(int(name) for name in names))


def definition(base: Path, request: AblationRequest) -> Ablation:
    """Load the ablation of the request from its file, the workspace's ablation.yaml or the study's,
    and check it.

    Raises:
        ConfigError: the file, a variant or a parameter is wrong.
    """
    own = base / ABLATION_FILE
    path = request.file or (own if own.is_file() else Path(__file__).with_name(ABLATION_FILE))
    ablation = load_ablation(path)
    for name in request.variants:
        ablation.variant(name)
    text = (base / PARAMS_FILE).read_text(encoding="utf-8")
    text = merge(text, overlays_of(text, profiles_of(base), request.profile, request.sets))
    recipe = dict(yaml_text.plain(yaml_text.parse(text, PARAMS_FILE)))
    check_recipes(ablation, recipe, dict(map(parse_assignment, request.sets)), str(path))
    return ablation


def make_plan(
    base: Path, request: AblationRequest, ablation: Ablation
) -> tuple[list[AblationJob], Path]:
    """Return the jobs of the request, the shared parts first, and the folder for the results.

    Overrides apply in this order: profile, the file's ``common``, ``--set``, the seed, the
    variant's own. So a variant always differs from its base by what it names. What a seed's
    variants share are the stages before PPO in DVC's graph.

    Raises:
        ConfigError: the pipeline lacks PPO or the evaluation.
    """
    graph = read_graph(base)
    for stage in (TRAINER, GOAL):
        if stage not in graph:
            raise ConfigError(
                f"{base / 'dvc.yaml'} has no stage '{stage}', which an ablation needs"
            )
    workspaces = base / TRIALS / FOLDER / request.name
    common = [*assignments(ablation.common), *request.sets]
    seeds = request.seeds or ablation.seeds
    names = [name for name in ablation.names if not request.variants or name in request.variants]

    def job(variant: str | None, seed: int) -> AblationJob:
        own = assignments(ablation.overrides(variant)) if variant else []
        workspace = workspaces / (variant or SHARED) / f"seed-{seed}"
        targets = (GOAL,) if variant else graph[TRAINER].after
        return AblationJob(variant, seed, workspace, (*common, f"seed={seed}", *own), targets)

    jobs = [job(None, seed) for seed in seeds] + [
        job(name, seed) for name in names for seed in seeds
    ]
    return jobs, base / FOLDER / (
        f"{request.name}-part" if request.is_part_of(ablation) else request.name
    )


def assignments(changes: Mapping[str, Any]) -> list[str]:
    """Write each change as ``section.key=value``, the value as JSON, which is YAML."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def listing(base: Path, request: AblationRequest) -> str:
    """Describe the variants of the request and the figures, one line each; nothing is run."""
    ablation = definition(base, request)
    width = max(len(name) for name in ablation.names)
    selected = [name for name in ablation.names if not request.variants or name in request.variants]
    variants = [f"{name.ljust(width)}  {ablation.variant(name).about}" for name in selected]
    figures = [f"{figure.name.ljust(width)}  {figure.title}" for figure in ablation.figures]
    return "\n".join(
        [
            "variants",
            *(f"  {line}" for line in variants),
            "figures",
            *(f"  {line}" for line in figures),
        ]
    )


GRACE_SECONDS = 5.0
ATTEMPTS = 2  # a crash is tried once more, a decision of a stage is not


def run_job(base: Path, profile: str | None, job: AblationJob, cache: Path) -> AblationRun:
    """Bring the job's targets up to date; a failing stage does not raise. A raised stop flag stops
    the job.
    """
    watch = Stopwatch()
    try:
        with locked(job.workspace):
            write_recipe(job.workspace, merged_params(base, profile, job.sets, job.workspace), base)
            ensure_dvc(job.workspace, cache)
            refresh_inputs(job.workspace)
            cleanup(job.workspace)
            for _ in range(ATTEMPTS):
                run = _reproduce(job, watch)
                if run.state != "crashed":
                    return run
            return replace(run, state="failed")
    except RlhfError as error:
        return job.ended("failed", str(error), watch.seconds)


def _reproduce(job: AblationJob, watch: Stopwatch) -> AblationRun:
    reports = job.workspace / OUTCOMES
    for path in reports.glob("*.json"):
        path.unlink()
    # Stages record to MLflow only where a server is named: hundreds of workspaces with a database
    # each help nobody.
    tracking = {} if os.environ.get("MLFLOW_TRACKING_URI") else {"RLHF_TRACKING": "off"}
    result = start_supervised(
        [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *job.targets],
        name=job.workspace.name,
        cwd=job.workspace,
        env=child_environment(job.workspace, **tracking),
        log=private_path(job.workspace, "logs", "ablation.log"),
        grace=GRACE_SECONDS,
    ).result()
    state: RunState = "crashed"
    message = [f"dvc exited with status {result.exit_code}", *dvc_errors(result.stdout)][-1]
    ended = (load_report(job.workspace, path.stem) for path in sorted(reports.glob("*.json")))
    report = next((report for report in ended if report is not None and report.exit_code), None)
    if result.exit_code == 0 or STOP.is_set():
        state, message = "stopped" if result.exit_code else "done", ""
    elif report is not None:
        message = f"{report.stage}: {report.message}"
        if report.exit_code == EXIT_TRAINING_PAUSED:
            state = "paused"
        # The other two come by a signal from outside, not by this run.
        elif report.exit_code in FINAL_CODES - {EXIT_INTERRUPTED, EXIT_PREEMPTED}:
            state = "failed"
    return job.ended(state, message, watch.seconds, f"Running stage '{TRAINER}'" in result.stdout)


POLL_SECONDS = 0.2


def run_jobs(
    jobs: Sequence[AblationJob],
    slots: int,
    run: Callable[[AblationJob], AblationRun],
    on_end: Callable[[AblationRun], None],
) -> list[AblationRun]:
    """Run all jobs, at most ``slots`` at a time, and return how they ran in the order of ``jobs``.

    A variant waits for the shared part of its seed and is skipped if that fails; other seeds
    continue. Once the stop flag is raised nothing more is started; running jobs check the flag
    themselves.

    Args:
        on_end: given each of them as soon as it is there.
    """
    ended: dict[AblationJob, AblationRun] = {}
    waiting, running = list(jobs), dict[Future[AblationRun], AblationJob]()

    def end(job: AblationJob, how: AblationRun) -> None:
        ended[job] = how
        on_end(how)

    with ThreadPoolExecutor(max_workers=slots) as threads:
        while waiting or running:
            shared = {job.seed: how for job, how in ended.items() if job.variant is None}
            ready = [job for job in waiting if job.variant is None or job.seed in shared]
            for job in list(waiting) if STOP.is_set() else ready[: slots - len(running)]:
                waiting.remove(job)
                before = shared.get(job.seed) if job.variant else None
                if STOP.is_set():
                    end(job, job.ended("stopped"))
                elif before is not None and before.state != DONE:
                    end(job, job.ended("skipped", f"{before.title}: {before.message}"))
                else:
                    running[threads.submit(run, job)] = job
            done = (
                wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done
                if running
                else set()
            )
            for future in done:
                end(running.pop(future), future.result())
    return [ended[job] for job in jobs]


LOCK = "ablation.lock"
REASON_LENGTH = 300


class ProgressLines:
    """Prints a line at the end of each job, with an estimate of the remaining time."""

    def __init__(self, count: int, slots: int) -> None:
        self.count, self.slots, self.watch = count, slots, Stopwatch()
        self.ended = 0
        self.training_seconds: list[float] = []

    def job_ended(self, run: AblationRun) -> None:
        """Print how a job ended."""
        self.ended += 1
        if run.trained:
            self.training_seconds.append(run.seconds)
        done = "trained" if run.trained else "done" if run.variant == SHARED else "up to date"
        verdict = done if run.state == DONE else run.state
        reason = f": {' '.join(run.message.split())[:REASON_LENGTH]}" if run.message else ""
        remaining = ""
        if self.training_seconds and self.ended < self.count:
            mean = sum(self.training_seconds) / len(self.training_seconds)
            minutes = (self.count - self.ended) * mean / self.slots / 60
            remaining = f"; about {max(minutes, 1):.0f} min to go"
        self.line(
            f"{self.ended}/{self.count} {run.title}: {verdict}, {run.seconds:.0f} s{reason}{remaining}"
        )

    def line(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{self.watch.seconds:7.1f} s] {text}", flush=True)


def ablate(base: Path, request: AblationRequest, jobs: int | None = None) -> int:
    """Run what the request names, ``jobs`` side by side (None: one per core), and write the
    results.

    Returns:
        The exit status: 0 when every run is done; 1 when some failed or were paused by their own
            training, in which
        case the results have the others; 130 when it was stopped, and the next call resumes.

    Raises:
        RlhfError: the request is wrong; nothing has been run.
    """
    signals.install()
    ablation = definition(base, request)
    with locked(base, LOCK):
        ensure_dvc(base)
        (planned, results), cache = make_plan(base, request, ablation), cache_of(base)
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        progress = ProgressLines(len(planned), jobs or cores)
        folder = display_path(planned[0].workspace.parents[1])
        progress.line(f"{len(planned)} jobs, {progress.slots} at a time, in {folder}")
        bring = partial(run_job, base, request.profile, cache=cache)
        runs = run_jobs(planned, progress.slots, bring, progress.job_ended)
        if signals.STOP.is_set():
            print("stopped; the next call resumes from here", file=sys.stderr)
            return EXIT_INTERRUPTED
        verdicts = summarise(ablation, [run for run in runs if run.variant != SHARED], results)
        counts = Counter(str(verdict.outcome) for figure in verdicts.values() for verdict in figure)
        claims = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        done = sum(run.state == DONE for run in runs)
        progress.line(f"{done} of {len(runs)} jobs done; claims: {claims or 'none'}")
        print(f"table:   {display_path(results / 'table.md')}")
        print(f"results: {display_path(results / 'results.csv')}")
        return int(done < len(runs))

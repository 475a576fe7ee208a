"""The pipeline as a Prefect flow: a task per stage in DVC's order, registration and promotion."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from httpx import HTTPError
from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext, get_run_context
from prefect.futures import PrefectFuture
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.dvc_repo.graph import StageNode, read_graph, recorded_hash
from flows.dvc_repo.inputs import refresh_inputs
from flows.dvc_repo.recipe import check_recipe, trial_workspace
from flows.jobs.deployments import deploy_jobs
from flows.jobs.job import Job
from flows.jobs.run_on_pool import run_on_pool, run_on_remote_pool
from flows.pipeline.artifacts import ProgressArtifact, publish_run
from flows.pipeline.events import (
    EventLog,
    PhaseStarted,
    RegistryUpdated,
    RunEnded,
    RunPlanned,
    StageEnded,
    StageRepeated,
    StageStarted,
    VerdictReached,
    events_file,
    failed_state,
    new_events_file,
)
from flows.pipeline.preflight import (
    find_unchanged,
    has_gated_policy,
    memory_refusal,
    pairs_refusal,
    undecided_because,
)
from flows.pipeline.record import (
    delivered_records,
    end_pipeline_run,
    start_pipeline_run,
    without_delivery,
)
from flows.pipeline.registration import (
    MATCH_LOG,
    follow_request,
    promote_task,
    register_task,
    was_suspended,
)
from flows.pipeline.verdict import REPORT_STAGE, RegistrationResult, RunVerdict, reach_verdict
from flows.prefect_server.flow_runs import cancel_orphans, given_name, stopped_on_cancellation, told
from flows.registry.policies import active_policies
from flows.stage import (
    LoggedProgress,
    StageOutcome,
    StageSpec,
    run_stage,
    shown_progress,
    stage_log,
)
from flows.supervision import signals
from flows.workspace import LOCK_HELD_VARIABLE, SEPARATOR, cleanup, locked, run_label, run_tags
from rlhf_core.config.loading import load_params
from rlhf_core.config.operations import FlowConfig, Placement
from rlhf_core.errors import RlhfError, named_line
from rlhf_core.storage.files import flatten
from rlhf_core.storage.garbage_collection import skip_last_collection

PIPELINE_FLOW = "rlhf-pipeline"
# Tasks wait in threads for those before them.
RUNNER = cast("TaskRunner[PrefectFuture[Any]]", ThreadPoolTaskRunner(max_workers=64))
PARENT_RUN_VARIABLE = "RLHF_PARENT_RUN_ID"


class StageSlots:
    """How many stages run at a time; of those that could start, the first in DVC's order does.

    So what stands on the longest way through the graph is not kept waiting by what has time: the
    judge trains beside PPO where two stages run at a time.
    """

    def __init__(self, count: int, graph: Mapping[str, StageNode]) -> None:
        """Let ``count`` stages of ``graph`` run at a time."""
        self._free, self._graph = count, graph
        self._begun: set[str] = set()
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, context: PipelineContext, name: str) -> Iterator[None]:
        """Hold one slot for the stage ``name``; it is waited for."""
        with self._changed:
            # What a stage has ended with is recorded after its slot is free, without a notice.
            while not self._changed.wait_for(lambda: self._is_next(context, name), timeout=0.5):
                pass
            self._free -= 1
            self._begun.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def _is_next(self, context: PipelineContext, name: str) -> bool:
        """Whether a slot is left for ``name`` after all ready stages that come before it."""
        if context.starts_no_more:
            return self._free > 0
        ready = 0
        for other, node in self._graph.items():
            if other == name:
                break
            if other not in self._begun and context.have_succeeded(node.after):
                ready += 1
        return self._free > ready


@dataclass(frozen=True)
class PipelineContext:
    """What the stage tasks of a run share.

    Attributes:
        environment: set for the stages on top of the usual one; it names the MLflow run that they
            belong to.
        slots: how many stages run at a time, and which of them comes first.
        outcomes: how each stage ended that was started.
    """

    workspace: Path
    pools: Mapping[str, Placement]
    flow: FlowConfig
    environment: Mapping[str, str]
    events: EventLog
    slots: StageSlots
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)

    def spec(self, node: StageNode, command: tuple[str, ...] | None = None) -> StageSpec:
        """Return how to run the stage ``node``, with ``command`` in place of DVC if given."""
        grace = float(self.flow.stop_grace_seconds)
        return StageSpec(self.workspace, node.name, node.outputs, self.environment, grace, command)

    def start(self, node: StageNode, placement: Placement | None = None) -> None:
        """Record that a stage starts, here or on its pool."""
        pool, log_start = placement.pool if placement else None, self._log_size(node)
        self.events.emit(StageStarted(node.name, pool, time.time(), log_start))

    def repeat(self, node: StageNode, message: str) -> None:
        """Record that a stage is run again or waits, and why; in Prefect's log too."""
        get_run_logger().warning("%s: %s", node.name, message)
        self.events.emit(StageRepeated(node.name, message, self._log_size(node)))

    def _log_size(self, node: StageNode) -> int:
        log = stage_log(self.workspace, node.name)
        return log.stat().st_size if log.exists() else 0

    def end(self, outcome: StageOutcome) -> None:
        """Record how a stage ended."""
        self.outcomes[outcome.stage] = outcome
        self.events.emit(StageEnded(outcome))

    def have_succeeded(self, stages: Iterable[str]) -> bool:
        """Whether all these stages have ended well."""
        ended = [self.outcomes.get(stage) for stage in stages]
        return all(outcome is not None and outcome.ok for outcome in ended)

    @property
    def starts_no_more(self) -> bool:
        """Whether stages that have not begun are skipped, which a failure or a stop causes."""
        return signals.STOP.is_set() or any(not outcome.ok for outcome in [*self.outcomes.values()])


def _run_name() -> str:
    """Return the name of this flow run, also where params.yaml is wrong; a given one stays."""
    if given := given_name():
        return given
    parameters = runtime.flow_run.parameters
    workspace = Path(str(parameters.get("workspace", "."))).resolve()
    try:
        profile = load_params(workspace).profile
    except RlhfError:
        profile = ""
    label = run_label(workspace, profile, datetime.now())
    changed = assignments(parameters.get("settings") or {})
    return SEPARATOR.join([label, *changed]) if changed else label


def assignments(settings: Mapping[str, Any]) -> list[str]:
    """Settings, nested or by dotted name, as ``rlhf run --set`` takes them."""
    return [f"{name}={json.dumps(value)}" for name, value in flatten(settings).items()]


@flow(
    name=PIPELINE_FLOW,
    flow_run_name=_run_name,
    persist_result=False,
    task_runner=RUNNER,
    on_failure=[cancel_orphans],
    on_cancellation=[cancel_orphans],
    on_crashed=[cancel_orphans],
)
def rlhf_pipeline(
    workspace: str = ".", promote: bool = True, settings: dict[str, Any] | None = None
) -> State[Any]:
    """Bring every stage of the workspace up to date, then register and promote what passed its
    gates.

    Ends Completed, Cancelled, or Failed under a name that says why: GateFailed, TrainingPaused,
    UserError, Preempted, StageFailed or RegistrationFailed. As a run of a deployment whose
    challenger waits for approval it suspends. Where nothing has changed since the last run it opens
    no run in MLflow.

    Args:
        workspace: The workspace's folder, as the worker sees it.
        promote: Let the new policy play against the champion at the end.
        settings: Settings of params.yaml for a trial in a workspace of its own, as `rlhf run --set`
            makes it: by dotted name, such as {"ppo.kl.coefficient": 0.1, "seed": 2}. Without any
            the workspace itself runs.
    """
    folder = Path(workspace).resolve()
    try:
        if settings:
            folder = trial_workspace(folder, None, assignments(settings))
        return told(_run_alone(folder, promote))
    except RlhfError as error:  # no trial could be made, or the workspace cannot be written to
        return told(failed_state(error.exit_code, str(error)))


def _run_alone(folder: Path, promote: bool) -> State[Any]:
    """Run the pipeline while nothing else runs in the workspace."""
    if threading.current_thread() is threading.main_thread():
        signals.install()
    answered = follow_request(folder) if was_suspended() else None
    if answered is not None and not answered.is_completed():
        return answered
    started_by_command = os.environ.pop(LOCK_HELD_VARIABLE, "") == str(
        folder
    )  # not for this process's children

    def tell(holder: str) -> None:
        get_run_logger().warning(holder)

    with nullcontext() if started_by_command else locked(folder, wait=True, on_wait=tell):
        if not started_by_command:
            cleanup(folder)
        events = EventLog(events_file(folder) if started_by_command else new_events_file(folder))
        try:
            params = load_params(folder)
            # Of a trial, or of pools named since `rlhf deploy`.
            if not started_by_command and params.pool_names():
                deploy_jobs(folder, params)
            with stopped_on_cancellation():
                return _run_pipeline(folder, promote, events, answered)
        except RlhfError as error:  # of no stage, such as a record that does not answer
            failed = failed_state(error.exit_code, str(error))
            events.emit(RunEnded(failed.name or "", str(error)))
            return failed


def _run_pipeline(
    workspace: Path, promote: bool, events: EventLog, answered: State[Any] | None
) -> State[Any]:
    """Run the stages and what follows; after an ``answered`` approval stages are only shown."""
    params = load_params(workspace)
    check_recipe(workspace)
    refresh_inputs(workspace)
    _describe_flow_run(workspace, params.profile)
    unchanged = find_unchanged(workspace, promotes=promote)
    if unchanged is not None:
        unchanged.emit(events)
        completed: State[Any] = Completed(message=unchanged.message)
        _publish(workspace, None, completed, unchanged.outcomes, unchanged.verdict)
        return completed
    if answered is not None:  # what has changed while the run waited is for the next one
        return answered
    for policy in active_policies(params.registry):  # a schedule asks nobody before it starts a run
        policy.before_run(workspace, params.registry)
    graph = read_graph(workspace)
    name = runtime.flow_run.name or run_label(workspace, params.profile, datetime.now())
    run_id = start_pipeline_run(workspace, name) if has_gated_policy(graph) else None
    environment = {PARENT_RUN_VARIABLE: run_id} if run_id else {}
    with delivered_records(workspace, bool(run_id)) as delivery:
        slots = StageSlots(params.flow.parallel, graph)
        context = PipelineContext(
            workspace, params.pools, params.flow, {**environment, **delivery}, events, slots
        )
        events.emit(RunPlanned(tuple(graph)))
        outcomes = _run_stages(graph, context)
        failed = next((o for o in outcomes.values() if not o.ok and o.action != "skipped"), None)
        if failed and REPORT_STAGE in graph and not signals.STOP.is_set():
            outcomes[REPORT_STAGE] = write_report.with_options(task_run_name=REPORT_STAGE)(
                context, graph[REPORT_STAGE]
            )
    _describe_flow_run(workspace, params.profile)
    state = _final_state(outcomes, failed)
    verdict: RunVerdict | None = None
    registration = RegistrationResult()
    if run_id:
        if state.is_completed():
            registration = _register(context, run_id, promote)
        if (
            registration.error and signals.STOP.is_set()
        ):  # what broke off is an effect of the signal
            state, registration = (
                _final_state(outcomes, failed),
                RegistrationResult(registration.registered),
            )
        elif registration.error:
            state = Failed(name="RegistrationFailed", message=f"registration: {registration.error}")
        elif registration.decision is not None and registration.decision.awaiting_approval:
            state = Completed(message=f"{state.message}; {registration.decision.describe()}")
        verdict, problem = reach_verdict(
            workspace, outcomes, registration, page=not signals.STOP.is_set()
        )
        if problem:
            get_run_logger().warning(problem)
        events.emit(VerdictReached(verdict))
    unpublished = _publish(workspace, run_id, state, outcomes, verdict)
    message = "; ".join(filter(None, (state.message, unpublished)))
    events.emit(RunEnded(state.name or state.type.value, message))
    if registration.decision is not None and params.registry.approval:
        follow_request(workspace)
    return state


def _publish(
    workspace: Path,
    run_id: str | None,
    state: State[Any],
    outcomes: Mapping[str, StageOutcome],
    verdict: RunVerdict | None,
) -> str:
    """Show how a run ended on the servers; return why that is incomplete, if it is."""
    try:
        if not signals.STOP.is_set():
            publish_run(workspace, run_id, outcomes, verdict)
        if run_id:
            end_pipeline_run(run_id, str(state.type.value), workspace)
    except Exception as error:  # of either server, of its client or of a disk
        get_run_logger().exception("the record of this run is incomplete")
        return f"its record is incomplete ({named_line(error)})"
    return ""


def _describe_flow_run(workspace: Path, profile: str) -> None:
    """Show workspace, profile and data as tags of this flow run."""
    data = (recorded_hash(workspace, "data/clean") or "")[:12]
    own = {*run_tags(workspace, profile).values(), *([f"data:{data}"] if data else [])}
    # The data that a run begins with may change in it.
    others = {tag for tag in runtime.flow_run.tags if not tag.startswith("data:")}
    with get_client(sync_client=True) as client:
        client.update_flow_run(runtime.flow_run.id, tags=sorted(others | own))


def _run_stages(
    graph: Mapping[str, StageNode], context: PipelineContext
) -> dict[str, StageOutcome]:
    """Run every stage once the stages before it are done, and return how each of them ended."""
    futures: dict[str, PrefectFuture[Any]] = {}
    config = context.flow
    for name, node in graph.items():
        named = stage_task.with_options(
            name=name,
            task_run_name=name,
            retries=config.retries,
            retry_delay_seconds=config.retry_delay_seconds,
        )
        before = [futures[other] for other in node.after]
        futures[name] = named.submit(context, node, return_state=False, wait_for=before)
    for name, future in futures.items():
        future.wait()
        if name not in context.outcomes and (future.state.is_crashed() or future.state.is_failed()):
            context.end(StageOutcome.failed(name, future.state.message or "its task failed"))
    return {name: context.outcomes.get(name) or StageOutcome(name, "skipped") for name in graph}


def _may_retry(task: Any, _: Any, state: State[Any]) -> bool:
    """Retry crashes; never a failed gate, a paused training, a user's mistake or a stopped run."""
    outcome = state.result(raise_on_failure=False)
    return isinstance(outcome, StageOutcome) and outcome.retryable and not signals.STOP.is_set()


@task(persist_result=False, retry_condition_fn=_may_retry, cache_policy=NO_CACHE)
def stage_task(context: PipelineContext, node: StageNode) -> StageOutcome | State[Any]:
    """Run one stage, here or on its pool; return its outcome, or a state that has it as data.

    A state rather than an exception: the log of a stage that failed or was stopped then shows no
    traceback of ours.
    """
    prefect_context = get_run_context()
    assert isinstance(prefect_context, TaskRunContext)
    attempt, placement = prefect_context.task_run.run_count, context.pools.get(node.name)
    with context.slots.taken(context, node.name):
        if attempt == 1 and context.starts_no_more:
            return Cancelled(message="not started", data=StageOutcome(node.name, "skipped"))
        if attempt == 1:
            context.start(node, placement)
        logger, artifact = get_run_logger(), ProgressArtifact(context.workspace, node.name)

        def show(progress: LoggedProgress) -> None:
            logger.info(progress.line)
            if placement is not None:
                with suppress(
                    HTTPError
                ):  # of a server that is away: what follows tells the same and more
                    artifact.show(progress)

        with shown_progress(context.workspace, node.name, show):
            refused = pairs_refusal(context.workspace, node.name)
            if placement is None:
                outcome = refused or _run_here(context, node)
            else:
                attempt_id = f"{prefect_context.task_run.id}:{attempt}"
                refused = refused or memory_refusal(context.workspace, node.name)
                outcome = refused or _run_as_job(context, node, placement, attempt_id)
    logger.info(outcome.line)
    if outcome.retryable and attempt <= context.flow.retries and not signals.STOP.is_set():
        reason = outcome.message.strip().partition("\n")[0]
        again = f"trying again in {context.flow.retry_delay_seconds:g} s"
        context.repeat(node, f"{reason}; {again}")
    else:
        context.end(outcome)
    if outcome.ok:
        return outcome
    return (Cancelled if outcome.action == "stopped" else Failed)(
        message=outcome.message, data=outcome
    )


def _run_here(context: PipelineContext, node: StageNode) -> StageOutcome:
    """Run the stage on this machine, again if the stage alone was preempted."""
    outcome = run_stage(context.spec(node))
    for _ in range(context.flow.max_preemptions):
        if not outcome.preempted or signals.STOP.is_set():
            break
        context.repeat(node, "preempted, resuming from its checkpoint")
        outcome = run_stage(context.spec(node))
    return outcome


def _run_as_job(
    context: PipelineContext, node: StageNode, placement: Placement, attempt_id: str
) -> StageOutcome:
    """Run the stage as a job of its pool."""
    spec = context.spec(node)
    if not placement.shared:
        spec = replace(spec, environment=without_delivery(spec.environment))
    job = Job(spec, placement, attempt_id, context.flow.max_preemptions)

    on_wait = partial(context.repeat, node)
    if placement.shared:
        return run_on_pool(job, on_wait)
    return run_on_remote_pool(job, node, on_wait)


@task(persist_result=False, cache_policy=NO_CACHE)
def write_report(context: PipelineContext, node: StageNode) -> StageOutcome:
    """Write the report of a failed run without DVC, which would require every dependency."""
    context.start(node)
    outcome = run_stage(context.spec(node, command=("/bin/sh", "-c", node.command)))
    context.events.emit(StageEnded(outcome))
    return outcome


def _final_state(outcomes: Mapping[str, StageOutcome], failed: StageOutcome | None) -> State[Any]:
    if signals.STOP.is_set():
        return Cancelled(message="stopped by a signal; the next run resumes from here")
    if failed is None:
        return Completed(message=f"{sum(o.action == 'ran' for o in outcomes.values())} stages ran")
    return failed_state(failed.exit_code, f"{failed.stage}: {failed.message}")


def _register(context: PipelineContext, run_id: str, promote: bool) -> RegistrationResult:
    """Register what passed its gates and promote it if params.yaml allows; a refusal is no failure."""
    config = load_params(context.workspace).registry
    registered = ""
    try:
        context.events.emit(PhaseStarted("registering the models"))
        registration = register_task(context.workspace, run_id)
        registered, challenger = registration.describe(), registration.challenger(config.policy)
        context.events.emit(RegistryUpdated(registered))
        if challenger is None:
            return RegistrationResult(registered)
        if because := undecided_because(promote, config.auto_promote):
            return RegistrationResult(registered, undecided_because=because)
        context.events.emit(PhaseStarted("promotion", log=MATCH_LOG))
        # The version that this run registered, whatever has become challenger from elsewhere since.
        decision = promote_task(context.workspace, version=challenger)
        verb = "promoted to" if decision.promoted else "not promoted to"
        described = (
            decision.describe()
            if decision.awaiting_approval
            else f"{verb} @champion: {decision.reason}"
        )
        context.events.emit(RegistryUpdated(described))
        return RegistrationResult(registered, decision)
    except Exception as error:
        return RegistrationResult(registered, error=str(error))


def main(argv: list[str]) -> int:
    """Run ``python -m flows.pipeline.flow WORKSPACE [--no-promote]``; return 0 if it completed.

    The command that started this process owns the services, and reads the details from the events
    file.
    """
    state = rlhf_pipeline(argv[0], promote="--no-promote" not in argv, return_state=True)
    return 0 if state.is_completed() else 1


if __name__ == "__main__":
    skip_last_collection()
    sys.exit(main(sys.argv[1:]))

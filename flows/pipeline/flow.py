"""The pipeline as a Prefect flow: a task per stage, in the order DVC's graph gives, gates as named failures."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext, get_run_context
from prefect.futures import PrefectFuture
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.dvc_repo.graph import StageNode, read_graph
from flows.jobs.job import Job
from flows.jobs.run_on_pool import run_on_pool, run_on_remote_pool
from flows.pipeline.artifacts import StageProgress, gate_tables, report_link, stage_table
from flows.pipeline.events import EVENTS_VARIABLE, Events
from flows.pipeline.late_runs import cancel_late_runs
from flows.pipeline.preflight import memory_refusal
from flows.pipeline.schedule import Schedule, final_name
from flows.prefect_server.flow_runs import cancel_orphans
from flows.stage.outcome import StageOutcome
from flows.stage.run import StageFailed, run_stage
from flows.stage.stage_hash import stage_hash
from flows.supervision import signals
from flows.supervision.processes import OWNER_VARIABLE, ownership_tag
from flows.workspace.cleanup import cleanup
from flows.workspace.lock import LOCK_HELD_VARIABLE, locked_unless_inherited
from rlhf_core.config.loading.load import load_params
from rlhf_core.config.operations import FlowConfig
from rlhf_core.config.placement import Placement

PIPELINE_FLOW = "rlhf-pipeline"
RUNNER = cast("TaskRunner[PrefectFuture[Any]]", ThreadPoolTaskRunner(max_workers=16))
REPORT_STAGE = "report"
REGISTERED_EVIDENCE = "gates/policy.json"


@dataclass(frozen=True)
class PipelineContext:
    """What every stage task of a run needs to know."""

    workspace: Path
    pools: Mapping[str, Placement]
    flow: FlowConfig
    environment: Mapping[str, str]
    events: Events


@flow(
    name=PIPELINE_FLOW,
    persist_result=False,
    task_runner=RUNNER,
    on_failure=[cancel_orphans],
    on_cancellation=[cancel_orphans],
    on_crashed=[cancel_orphans],
)
def rlhf_pipeline(workspace: str = ".", promote: bool = True) -> State[Any]:
    """Bring every stage of the workspace up to date, then register and promote what passed its gates.

    Ends Completed, Cancelled, or Failed under a name that says why: GateFailed, TrainingPaused, UserError, StageFailed.
    """
    if threading.current_thread() is threading.main_thread():
        signals.install()
    place = Path(workspace).resolve()
    with locked_unless_inherited(place):
        if not os.environ.get(LOCK_HELD_VARIABLE):
            os.environ[OWNER_VARIABLE] = ownership_tag(place)
            cleanup(place)
            cancel_late_runs()
        return _run(place, promote)


def _run(workspace: Path, promote: bool) -> State[Any]:
    params = load_params(workspace)
    graph = read_graph(workspace)
    recorded = any(REGISTERED_EVIDENCE in node.outputs for node in graph.values())
    events = Events(os.environ.get(EVENTS_VARIABLE))
    environment = _open_record(workspace) if recorded else {}
    setting = PipelineContext(workspace, params.pools, params.flow, environment, events)
    events.tell("plan", stages=list(graph))
    outcomes = _run_stages(graph, setting)
    failed = next((o for o in outcomes.values() if not o.ok and o.action != "skipped"), None)
    if failed and REPORT_STAGE in graph and not signals.STOP.is_set():
        outcomes[REPORT_STAGE] = write_report.with_options(task_run_name=REPORT_STAGE)(setting, graph[REPORT_STAGE])
    state = _final_state(outcomes, failed)
    if state.is_completed() and recorded:
        state = _register(setting, promote, state)
    _publish(workspace, list(outcomes.values()))
    if environment:
        _close_record(workspace, environment["RLHF_PARENT_RUN_ID"], state)
    events.tell("end", state=state.name, message=state.message or "")
    return state


def _run_stages(graph: Mapping[str, StageNode], setting: PipelineContext) -> dict[str, StageOutcome]:
    """Run every stage as soon as those before it are done; at most ``flow.parallel`` beside the flow at a time."""
    schedule = Schedule(graph, setting.flow.parallel)
    running: dict[str, Any] = {}
    while not schedule.finished:
        for name in schedule.take(stopping=signals.STOP.is_set()):
            running[name] = _submit(graph[name], setting)
        for name in [n for n, future in running.items() if future.wrapped_future.done()]:
            outcome = _collect(name, running.pop(name))
            schedule.done(outcome)
            setting.events.tell("stage", **_summary(outcome))
        if running:
            signals.STOP.wait(0.05) if not signals.STOP.is_set() else threading.Event().wait(0.05)
    return schedule.outcomes


def _submit(node: StageNode, setting: PipelineContext) -> Any:
    place = setting.pools.get(node.name)
    setting.events.tell("start", stage=node.name, pool=place.pool if place else None)
    options = stage_task.with_options(
        name=node.name,
        task_run_name=node.name,
        retries=setting.flow.retries,
        retry_delay_seconds=setting.flow.retry_delay_seconds,
    )
    return options.submit(setting, node, place)


def _may_retry(_: Any, run: Any, state: State[Any]) -> bool:
    """A crash is tried again; a failed gate, a pause, a user's mistake or a stopped run is not."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and error.outcome.retryable and not signals.STOP.is_set()


@task(persist_result=False, retry_condition_fn=_may_retry, cache_policy=NO_CACHE)
def stage_task(setting: PipelineContext, node: StageNode, place: Placement | None) -> StageOutcome:
    """One stage, here or on its pool. Raises ``StageFailed`` with the outcome."""
    context = get_run_context()
    assert isinstance(context, TaskRunContext)
    attempt = context.task_run.run_count
    if signals.STOP.is_set():
        raise StageFailed(stopped(node.name))
    if place is None:
        outcome = _run_beside(setting, node)
    else:
        cannot_fit = memory_refusal(setting.workspace, node.name)
        outcome = cannot_fit or _run_on(place, setting, node, f"{context.task_run.id}:{attempt}")
    get_run_logger().info("%s: %s %s", node.name, outcome.action, outcome.message)
    if not outcome.ok:
        if outcome.retryable and attempt <= setting.flow.retries:
            delay = setting.flow.retry_delay_seconds
            setting.events.tell("retry", stage=node.name, message=outcome.message, delay=delay)
        raise StageFailed(outcome)
    return outcome


def _work(setting: PipelineContext, node: StageNode) -> tuple[Path, str, tuple[str, ...], Mapping[str, str], float]:
    grace = float(setting.flow.stop_grace_seconds)
    return setting.workspace, node.name, node.outputs, setting.environment, grace


def _run_beside(setting: PipelineContext, node: StageNode) -> StageOutcome:
    """The stage on this machine; one that was told to stop while the run goes on is run again."""
    outcome = run_stage(*_work(setting, node))
    for _ in range(setting.flow.max_preemptions):
        if not outcome.preempted or signals.STOP.is_set():
            break
        setting.events.tell("preempted", stage=node.name, message="preempted, goes on from its checkpoint")
        outcome = run_stage(*_work(setting, node))
    return outcome


def _run_on(place: Placement, setting: PipelineContext, node: StageNode, attempt: str) -> StageOutcome:
    """The stage as a job of its pool."""
    progress = StageProgress(setting.workspace, node.name)
    # What other hosts compute cannot be shared with a workspace that they do not see.
    same = stage_hash(setting.workspace, node) if place.shared else None
    job = Job(*_work(setting, node), place, attempt, same, setting.flow.max_preemptions)

    def tell(text: str) -> None:
        setting.events.tell("preempted", stage=node.name, message=f"{text} of {place.pool}")

    if place.shared:
        outcome = run_on_pool(job, progress.update, tell)
    else:
        outcome = run_on_remote_pool(job, node, progress.update, tell)
    progress.update()
    return outcome


@task(persist_result=False, cache_policy=NO_CACHE)
def write_report(setting: PipelineContext, node: StageNode) -> StageOutcome:
    """The report of a run that failed: the stage's command itself, since not all that DVC asks for exists."""
    setting.events.tell("start", stage=node.name, pool=None)
    command = ["/bin/sh", "-c", node.command]
    outcome = run_stage(setting.workspace, node.name, node.outputs, setting.environment, command=command)
    setting.events.tell("stage", **_summary(outcome))
    return outcome


def stopped(stage: str) -> StageOutcome:
    """The outcome of a stage that a stopped run did not begin."""
    return StageOutcome(stage, "stopped", 130, "stopped", 0.0, 0.0, 0.0)


def _collect(name: str, future: Any) -> StageOutcome:
    """The outcome behind a finished future; an error of the engine itself is a failure of the stage."""
    try:
        result = future.result(raise_on_failure=False)
    except Exception as error:
        result = error
    if isinstance(result, StageOutcome):
        return result
    if isinstance(result, StageFailed):
        return result.outcome
    return StageOutcome(name, "failed", 1, f"{type(result).__name__}: {result}", 0.0, 0.0, 0.0)


def _summary(outcome: StageOutcome) -> dict[str, Any]:
    return {
        "stage": outcome.stage,
        "action": outcome.action,
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "started": outcome.started,
        "ended": outcome.ended,
        "work": outcome.work,
    }


def _final_state(outcomes: Mapping[str, StageOutcome], failed: StageOutcome | None) -> State[Any]:
    if signals.STOP.is_set():
        return Cancelled(message="stopped by a signal; the next run goes on from here")
    if failed is None:
        return Completed(message=f"{sum(o.action == 'ran' for o in outcomes.values())} stages ran")
    return Failed(name=final_name(failed.exit_code), message=f"{failed.stage}: {failed.message}")


def _publish(workspace: Path, outcomes: list[StageOutcome]) -> None:
    """Artifacts of the run; a server that is gone by now does not change the result."""
    if signals.STOP.is_set():
        return
    stage_table(outcomes)
    gate_tables(workspace)
    report_link(workspace)


def _open_record(workspace: Path) -> dict[str, str]:
    from flows.registry.mlflow_client import start_pipeline_run

    return {"RLHF_PARENT_RUN_ID": start_pipeline_run(workspace)}


def _close_record(workspace: Path, run_id: str, state: State[Any]) -> None:
    from flows.registry.mlflow_client import end_pipeline_run, log_final_artifacts

    if not signals.STOP.is_set():
        log_final_artifacts(workspace, run_id)
    end_pipeline_run(run_id, str(state.type.value), workspace)


def _register(setting: PipelineContext, promote: bool, state: State[Any]) -> State[Any]:
    """Register what passed, then promote it if params allow; a refusal is a result, an error fails the run."""
    from flows.pipeline.registration import promote_task, register_task

    registry, tell = load_params(setting.workspace).registry, setting.events.tell
    try:
        text, registered = register_task(setting.workspace, setting.environment["RLHF_PARENT_RUN_ID"])
        tell("registry", text=text)
        if registered and promote and registry.auto_promote and not registry.approval:
            tell("registry", text=promote_task(setting.workspace))
        elif registered and registry.approval:
            tell("registry", text="promotion waits for a person: `rlhf promote`, or the promotion deployment")
    except Exception as error:
        return Failed(name="RegistrationFailed", message=f"registration: {error}")
    return state

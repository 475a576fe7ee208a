"""``rlhf status``: what a workspace holds and what is under way, on one screen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.commands.display.formats import format_seconds
from flows.commands.display.run_state import read_run_state
from flows.commands.display.stage_lines import describe_stages
from flows.dvc_repo.status import describe_changes, dvc_status
from flows.registry.alias_transaction import pending
from flows.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS, get_version, read_aliases, versions
from flows.registry.mlflow_client import PIPELINE_TAG, connect, has_record
from flows.workspace.lock import LockHolder, lock_holder
from rlhf_core.config.loading.load import Params, load_params
from rlhf_core.config.loading.yaml_text import plain, read
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.files import read_json

DETAIL = 70


def status(workspace: Path) -> str:
    """Describe stages (as DVC sees them), gates, partial work, the last run, the registry, and the lock's holder.

    Nothing is changed or created. Changed code shows here once the next run has refreshed the fingerprints.
    """
    workspace = workspace.resolve()
    params = load_params(workspace)
    holder = lock_holder(workspace)
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    with console.status("reading stages, runs and models"):
        parts = _sections(workspace, params, holder)
    head = f"workspace {workspace}\nin use by: {holder or 'nobody'}"
    sections = [f"{title}\n" + "\n".join(f"  {line}" for line in lines or ["none"]) for title, lines in parts.items()]
    report = workspace / "report.html"
    return "\n\n".join([head, *sections, f"report: {report if report.is_file() else 'not written yet'}"])


def _sections(workspace: Path, params: Params, holder: LockHolder | None) -> dict[str, list[str]]:
    return {
        "stages": stage_lines(workspace) if holder is None else running_stage_lines(workspace, holder),
        "gates": gate_lines(workspace),
        "to resume": partial_work(workspace),
        "last run": _lines_or_error(lambda: last_run(workspace, params.tracking.experiment, holder is not None)),
        "registry": _lines_or_error(lambda: registry_lines(workspace, params.registry)),
    }


def _lines_or_error(describe: Callable[[], Iterable[str]]) -> list[str]:
    """Return the lines of one section, or the message of an error: MLflow out of reach does not hide the rest."""
    try:
        return list(describe())
    except RlhfError as error:
        return [str(error)]


def stage_lines(workspace: Path) -> list[str]:
    """Return one line per stage of dvc.yaml: up to date, not run yet, or stale and why."""
    stages = plain(read(workspace / "dvc.yaml")).get("stages") or {}
    lock = workspace / "dvc.lock"
    recorded = (plain(read(lock)) or {}).get("stages") or {} if lock.is_file() else {}
    try:
        stale = dvc_status(workspace)
    except RlhfError as error:
        return [str(error)]
    names = [name for name, stage in stages.items() if not stage.get("always_changed")]
    width = max((len(name) for name in names), default=0)
    return [f"{name.ljust(width)}  {_state(name, stale, recorded)}" for name in names]


def running_stage_lines(workspace: Path, holder: LockHolder) -> list[str]:
    """Return one line per stage of the run under way: done and its result, running and its progress, or waiting.

    DVC, which a stage keeps locked, is not asked.
    """
    since = datetime.fromisoformat(holder.since)
    state = read_run_state(workspace, since)
    if state is None or state.ended or not state.stages:
        return ["a command has just started, or does not report its stages; it keeps DVC from telling their state"]
    now = datetime.now()
    elapsed = format_seconds((now - since).total_seconds())
    phase = f"; {state.phase}" if state.phase else ""
    head = f"{state.done}/{len(state.stages)} done after {elapsed}{phase}"
    return [head, *describe_stages(list(state.stages.values()), now.timestamp())]


def _state(name: str, stale: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    if name not in recorded:
        return "not run yet"
    if name not in stale:
        return "up to date"
    details = describe_changes(stale[name])
    return f"stale: {details if len(details) <= DETAIL else details[:DETAIL] + ' …'}"


def gate_lines(workspace: Path) -> list[str]:
    """Return one line per gate that has decided: passed, or the conditions that failed."""
    lines = []
    for path in sorted((workspace / "gates").glob("*.json")):
        report = read_json(path)
        failed = [c["metric"] for c in report.get("conditions", []) if not c.get("passed")]
        verdict = "passed" if report.get("passed") else f"FAILED ({', '.join(failed)})"
        lines.append(f"{path.stem.ljust(8)}{verdict}, mode {report.get('mode', 'enforce')}")
    return lines


def partial_work(workspace: Path) -> list[str]:
    """Return the stages with saved partial state, from which the next run resumes if no dependency has changed."""
    lines = []
    for folder in sorted((workspace / "work").glob("*/*")):
        checkpoints = sorted(path.name for path in folder.rglob("step-*") if path.is_dir())
        if checkpoints:
            lines.append(f"{folder.parent.name}: {checkpoints[-1]} (work/{folder.parent.name}/{folder.name})")
    return lines


def last_run(workspace: Path, experiment: str, in_use: bool) -> list[str]:
    """Describe the newest pipeline run: when it started, how it ended, its id."""
    if not has_record(workspace):
        return []
    client = connect(workspace)
    mlflow_experiment = client.get_experiment_by_name(experiment)
    if mlflow_experiment is None:
        return []
    of_workspace = f"tags.`{PIPELINE_TAG}` = 'true' and tags.`rlhf.workspace` = '{workspace.name}'"
    newest_first = ["attributes.start_time DESC"]
    ids = [mlflow_experiment.experiment_id]
    runs = client.search_runs(ids, of_workspace, max_results=1, order_by=newest_first)
    return [_describe_run(run.info, in_use) for run in runs]


def _describe_run(info: Any, in_use: bool) -> str:
    started = datetime.fromtimestamp(info.start_time / 1000)
    state = info.status.lower()
    if state == "running" and not in_use:
        state = "interrupted (its process is gone; the next run resumes)"
    duration = f" after {(info.end_time - info.start_time) / 1000:.0f} s" if info.end_time else ""
    return f"{started:%Y-%m-%d %H:%M:%S}  {state}{duration}  (MLflow run {info.run_id})"


def registry_lines(workspace: Path, config: RegistryConfig) -> list[str]:
    """Describe each registered model: how many versions it has, and where its aliases point."""
    if not has_record(workspace):
        return []
    client = connect(workspace)
    lines = []
    for name in (config.policy, config.reward_model):
        count = len(versions(client, name))
        if not count:
            lines.append(f"{name}: no version yet")
            continue
        numbers = read_aliases(client, name)
        aliases = ", ".join(
            f"@{alias} v{numbers[alias]}" for alias in (CHAMPION, CHALLENGER, PREVIOUS) if alias in numbers
        )
        lines.append(f"{name}: {count} version{'s' if count > 1 else ''}; {aliases or 'no alias'}")
        latest = get_version(client, name, numbers[CHALLENGER]) if CHALLENGER in numbers else None
        if latest is not None and latest.tags.get("decision.reason"):
            lines.append(f"  v{latest.version}, last decision: {latest.tags['decision.reason']}")
    interrupted = pending(client, config)
    if interrupted is not None:
        action = interrupted.decision["action"]
        lines.append(f"a {action} was interrupted; the next promote, rollback, run or chat completes it")
    return lines

"""What a workspace holds and what is under way, on one screen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.dvc_repo.status import describe_changes, dvc_status
from flows.registry.alias_transaction import pending
from flows.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS, get_version, read_aliases, versions
from flows.registry.mlflow_client import PIPELINE_TAG, connect, has_record
from rlhf_core.config.loading.load import load_params
from rlhf_core.config.loading.yaml_text import plain, read
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.files import read_json

DETAIL = 70


def status(workspace: Path) -> str:
    """Stages (as DVC sees them), gates, partial work, the last run, the registry, and who holds the workspace.

    Nothing is changed or created. A changed line of code shows here once the next run has refreshed the fingerprints.
    """
    workspace = workspace.resolve()
    params = load_params(workspace)
    holder = lock_holder(workspace)
    parts = {
        "stages": stage_lines(workspace),
        "gates": gate_lines(workspace),
        "to resume": partial_work(workspace),
        "last run": _guarded(lambda: last_run(workspace, params.tracking.experiment, holder is not None)),
        "registry": _guarded(lambda: registry_lines(workspace, params.registry)),
    }
    head = f"workspace {workspace}\nin use by: {holder or 'nobody'}"
    sections = [f"{title}\n" + "\n".join(f"  {line}" for line in lines or ["none"]) for title, lines in parts.items()]
    report = workspace / "report.html"
    return "\n\n".join([head, *sections, f"report: {report if report.is_file() else 'not written yet'}"])


def _guarded(lines: Any) -> list[str]:
    """A record that does not answer is a line of the screen, not the end of it."""
    try:
        return list(lines())
    except RlhfError as error:
        return [str(error)]


def stage_lines(workspace: Path) -> list[str]:
    """One line per stage of dvc.yaml: up to date, not run yet, or stale and why."""
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


def _state(name: str, stale: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    if name not in recorded:
        return "not run yet"
    if name not in stale:
        return "up to date"
    details = describe_changes(stale[name])
    return f"stale: {details if len(details) <= DETAIL else details[:DETAIL] + ' …'}"


def gate_lines(workspace: Path) -> list[str]:
    """One line per gate that has decided: passed, or the conditions that failed."""
    lines = []
    for path in sorted((workspace / "gates").glob("*.json")):
        report = read_json(path)
        failed = [c["metric"] for c in report.get("conditions", []) if not c.get("passed")]
        verdict = "passed" if report.get("passed") else f"FAILED ({', '.join(failed)})"
        lines.append(f"{path.stem.ljust(8)}{verdict}, mode {report.get('mode', 'enforce')}")
    return lines


def partial_work(workspace: Path) -> list[str]:
    """Stages with saved partial state, which the next run goes on from if nothing they depend on has changed."""
    lines = []
    for folder in sorted((workspace / "work").glob("*/*")):
        saves = sorted(path.name for path in folder.rglob("step-*") if path.is_dir())
        if saves:
            lines.append(f"{folder.parent.name}: {saves[-1]} (work/{folder.parent.name}/{folder.name})")
    return lines


def lock_holder(workspace: Path) -> str | None:
    """The command that holds the workspace now, or None. The lock itself is not touched."""
    import psutil

    try:
        record = json.loads((workspace / ".rlhf" / "lock").read_text(encoding="utf-8"))
        alive = psutil.pid_exists(int(record["pid"]))
        return f"`{record['command']}` (pid {record['pid']}, since {record['since']})" if alive else None
    except (OSError, ValueError, KeyError):
        return None


def last_run(workspace: Path, experiment: str, in_use: bool) -> list[str]:
    """The newest pipeline run: when, how it ended, its id."""
    if not has_record(workspace):
        return []
    client = connect(workspace)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    mine = f"tags.`{PIPELINE_TAG}` = 'true' and tags.`rlhf.workspace` = '{workspace.name}'"
    runs = client.search_runs([found.experiment_id], mine, max_results=1, order_by=["attributes.start_time DESC"])
    return [_describe_run(run.info, in_use) for run in runs]


def _describe_run(info: Any, in_use: bool) -> str:
    started = datetime.fromtimestamp(info.start_time / 1000)
    state = info.status.lower()
    if state == "running" and not in_use:
        state = "interrupted (its process is gone; the next run goes on)"
    took = f" after {(info.end_time - info.start_time) / 1000:.0f} s" if info.end_time else ""
    return f"{started:%Y-%m-%d %H:%M:%S}  {state}{took}  (MLflow run {info.run_id})"


def registry_lines(workspace: Path, config: RegistryConfig) -> list[str]:
    """Per registered model: how many versions, and which ones the aliases point to."""
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

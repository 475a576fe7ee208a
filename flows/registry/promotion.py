"""Promotion: the challenger plays the champion, and takes its place only where every judge is sure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.dvc_repo.lock_file import recorded_hash
from flows.registry.decisions import match_file, read_decisions, write_decision
from flows.registry.mlflow_client import connect, prepare_tracking
from flows.registry.register import (
    CHALLENGER,
    CHAMPION,
    CONTENT_TAG,
    PREVIOUS,
    REWARD_VERSION_TAG,
    alias_version,
    model_folder,
)
from flows.supervision.environment import child_environment
from flows.supervision.processes import start_guarded
from flows.workspace.lock import locked
from rlhf_core.config.evaluate import EvaluateConfig
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.files import atomic_write_json, read_json

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

Match = Callable[[Path, Path, Path], Mapping[str, Any]]
ROLLED_BACK_TAG = "rolled_back"


def promote(
    workspace: Path,
    *,
    force_reason: str | None = None,
    dry_run: bool = False,
    only_version: str | None = None,
    play: Match | None = None,
) -> dict[str, Any]:
    """Decide whether ``@challenger`` becomes ``@champion``, act on it, and keep the decision as an immutable report.

    Without a champion the challenger takes the place at once; else :func:`verdict` rules. ``force_reason`` promotes
    whatever the match says and is recorded. ``dry_run`` decides and changes nothing. ``only_version`` is the challenger
    that was approved: another one in its place is refused. ``play(workspace, champion, challenger)`` runs the match; by
    default in a process of its own. Returns the decision, with ``promoted`` and ``reason``.
    """
    workspace = workspace.resolve()
    if force_reason is not None and not force_reason.strip():
        raise RlhfError("a forced promotion needs a reason; say why, it is recorded")
    config = load_section(workspace, "registry", RegistryConfig)
    prepare_tracking(workspace)
    with locked(workspace, "registry.lock", wait=True):
        client = connect(workspace)
        challenger = alias_version(client, config.policy, CHALLENGER)
        if challenger is None:
            raise RlhfError(f"{config.policy} has no @{CHALLENGER}; `rlhf run` registers one once its gates pass")
        if only_version not in (None, str(challenger.version)):
            raise RlhfError(f"the challenger is version {challenger.version} now, not {only_version}; look at it again")
        champion = alias_version(client, config.policy, CHAMPION)
        decision = _decide(workspace, config, challenger, champion, force_reason, play or play_match)
        decision["dry_run"] = dry_run
        if dry_run or decision["unchanged"]:
            return decision
        if decision["promoted"]:
            _crown(client, config, challenger, champion)
        return _record(client, workspace, challenger, decision)


def _decide(
    workspace: Path,
    config: RegistryConfig,
    challenger: ModelVersion,
    champion: ModelVersion | None,
    force_reason: str | None,
    play: Match,
) -> dict[str, Any]:
    """The decision as data. ``unchanged`` marks one that says nothing new and leaves no report."""
    decision: dict[str, Any] = {
        "action": "promote",
        "model": config.policy,
        "challenger": str(challenger.version),
        "champion": None if champion is None else str(champion.version),
        "bar": config.promote_win_rate_low95,
        "forced": force_reason,
        "match": None,
        "unchanged": False,
    }
    if champion is None:
        return decision | {"promoted": True, "reason": "there is no champion yet"}
    if champion.version == challenger.version:
        return decision | {"promoted": False, "unchanged": True, "reason": "the challenger is the champion already"}
    refusal = challenger.tags.get(ROLLED_BACK_TAG)
    if refusal and force_reason is None:
        return decision | {"promoted": False, "unchanged": True, "reason": f"it was rolled back ({refusal}); force it"}
    question = _question(workspace, challenger, champion)
    decision["question"] = question
    try:
        decision["match"] = _match(workspace, config.policy, question, champion, challenger, play)
        passed, reason = verdict(decision["match"], config.promote_win_rate_low95)
    except RlhfError as error:
        if force_reason is None:
            raise
        passed, reason = False, f"no match: {error}"
    if force_reason is not None:
        return decision | {"promoted": True, "reason": f"forced: {force_reason.strip()} (otherwise: {reason})"}
    told = [d for d in read_decisions(workspace) if d.get("question") == question and d.get("bar") == decision["bar"]]
    return decision | {"promoted": passed, "reason": reason, "unchanged": bool(told) and not passed}


def _match(
    workspace: Path,
    name: str,
    question: Mapping[str, Any],
    champion: ModelVersion,
    challenger: ModelVersion,
    play: Match,
) -> dict[str, Any]:
    """The result of the match, from an earlier asking where there was one."""
    kept = match_file(workspace, question)
    if not kept.is_file():
        folders = [model_folder(workspace, name, str(version.version)) for version in (champion, challenger)]
        atomic_write_json(kept, dict(play(workspace, *folders)))
    result: dict[str, Any] = read_json(kept)
    return result


def verdict(match: Mapping[str, Any], bar: float) -> tuple[bool, str]:
    """Whether the challenger wins: by every judge the lower 95 % bound of its win rate is above ``bar``.

    A bound equal to the bar does not do: two identical models tie everywhere, at exactly one half.
    """
    judges = match.get("comparison") or {}
    if not judges:
        return False, "no judge has compared them"
    lows = {name: float(result["win_rate_low95"]) for name, result in judges.items()}
    words = ", ".join(
        f"{name} win rate {judges[name]['win_rate']:.3f} (at least {low:.3f})" for name, low in sorted(lows.items())
    )
    short = sorted(name for name, low in lows.items() if not low > bar)
    if short:
        return False, f"not above {bar:g} with 95 % confidence by {' and '.join(short)}: {words}"
    return True, f"above {bar:g} with 95 % confidence by every judge: {words}"


def _question(workspace: Path, challenger: ModelVersion, champion: ModelVersion) -> dict[str, Any]:
    """What a match would be about: its answer is the same as long as this is."""
    return {
        "challenger": challenger.tags.get(CONTENT_TAG),
        "champion": champion.tags.get(CONTENT_TAG),
        "prompts": recorded_hash(workspace, "data/clean"),
        "referee": recorded_hash(workspace, "models/referee"),
        "settings": load_section(workspace, "evaluate", EvaluateConfig).model_dump(mode="json"),
    }


def play_match(workspace: Path, champion: Path, challenger: Path) -> dict[str, Any]:
    """Run ``rlhf match`` in a guarded process and return its result; ``RlhfError`` with its last line if it fails."""
    output = workspace / ".rlhf" / "match.json"
    log = workspace / ".rlhf" / "logs" / "match.log"
    output.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    command = [sys.executable, "-c", "from rlhf_core.cli import app; app()", "match", "--workspace", str(workspace)]
    command += ["--champion", str(champion), "--challenger", str(challenger), "--output", str(output)]
    process = start_guarded(command, name="match", cwd=workspace, env=child_environment(workspace), log=log)
    try:
        while (code := process.poll()) is None:
            time.sleep(0.1)
    finally:
        process.stop()
    if code:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise RlhfError(f"the match ended with code {code}: {lines[-1] if lines else 'no output'} (log: {log})")
    result: dict[str, Any] = read_json(output)
    return result


def _crown(client: MlflowClient, config: RegistryConfig, new: ModelVersion, old: ModelVersion | None) -> None:
    """Move the aliases of the policy, and of the reward model that trained it. ``@previous`` moves first: a crash in
    between leaves the old champion in place, and promoting again completes it."""
    _move(client, config.policy, str(new.version), None if old is None else str(old.version))
    if ROLLED_BACK_TAG in new.tags:
        client.delete_model_version_tag(config.policy, str(new.version), ROLLED_BACK_TAG)
    reward_version = new.tags.get(REWARD_VERSION_TAG)
    if reward_version:
        before = alias_version(client, config.reward_model, CHAMPION)
        _move(client, config.reward_model, reward_version, None if before is None else str(before.version))


def _move(client: MlflowClient, name: str, new: str, old: str | None) -> None:
    if old == new:
        return
    if old is not None:
        client.set_registered_model_alias(name, PREVIOUS, old)
    client.set_registered_model_alias(name, CHAMPION, new)


def rollback(workspace: Path, reason: str) -> dict[str, Any]:
    """Swap ``@champion`` and ``@previous``, for the policy and the reward model behind it, and record why.

    ``RlhfError`` when the reason is empty or there is nothing to go back to.
    """
    workspace = workspace.resolve()
    if not reason.strip():
        raise RlhfError("a rollback needs a reason; say why, it is recorded")
    config = load_section(workspace, "registry", RegistryConfig)
    prepare_tracking(workspace)
    with locked(workspace, "registry.lock", wait=True):
        client = connect(workspace)
        champion = alias_version(client, config.policy, CHAMPION)
        previous = alias_version(client, config.policy, PREVIOUS)
        if champion is None or previous is None or champion.version == previous.version:
            raise RlhfError(f"{config.policy} has no @{PREVIOUS} to go back to; `rlhf status` shows what there is")
        _crown(client, config, previous, champion)
        client.set_model_version_tag(config.policy, str(champion.version), ROLLED_BACK_TAG, reason.strip()[:1000])
        decision = {
            "action": "rollback",
            "model": config.policy,
            "champion": str(previous.version),
            "previous": str(champion.version),
            "reason": reason.strip(),
        }
        return _record(client, workspace, previous, decision)


def decline(workspace: Path, plan: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Record that a person refused the promotion that a dry run had planned; nothing moves."""
    workspace = workspace.resolve()
    with locked(workspace, "registry.lock", wait=True):
        client = connect(workspace)
        version = client.get_model_version(plan["model"], plan["challenger"])
        refusal = {
            "promoted": False,
            "dry_run": False,
            "reason": f"not approved: {reason.strip() or 'no reason given'}",
        }
        return _record(client, workspace, version, {**plan, **refusal})


def _record(client: MlflowClient, workspace: Path, version: ModelVersion, decision: dict[str, Any]) -> dict[str, Any]:
    """The decision as a file, as tags of the version, and as an artifact of the run that registered it."""
    path = write_decision(workspace, decision)
    tags = {"decision.action": decision["action"], "decision.reason": decision["reason"], "decision.report": path.name}
    if decision["action"] == "promote":
        tags["decision.promoted"] = str(decision["promoted"]).lower()
    for key, value in tags.items():
        client.set_model_version_tag(version.name, str(version.version), key, value[:5000])
    if version.run_id:
        client.log_artifact(version.run_id, str(path), "promotions")
    return decision | {"report": str(path)}

"""The registry section of ``rlhf status``: versions, aliases, how the champion stands to this workspace, decisions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.commands.display.formats import format_age
from flows.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS, read_aliases, versions
from flows.registry.client import connect, has_record
from flows.registry.decisions import pending, read_decisions
from flows.registry.history import latest_request, read_history
from flows.registry.stored_models import CONTENT_TAG
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import sha256_tree

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

POLICY_FOLDER = Path("models") / "policy"


@dataclass(frozen=True)
class RegistryStatus:
    """The lines to show, and what the next command depends on.

    Attributes:
        champion: Version number of the champion, None if there is none.
        interrupted: The action that was begun and not completed, empty if none was.
        decided: When the last decision was made, None if none was.
        awaiting: The version that waits for approval, empty if none does.
    """

    lines: list[str]
    champion: str | None = None
    interrupted: str = ""
    decided: datetime | None = None
    awaiting: str = ""


def registry_status(workspace: Path, config: RegistryConfig, stale_stages: int, now: datetime) -> RegistryStatus:
    """Describe each registered model, the champion and the last decision.

    Args:
        stale_stages: How many stages are not up to date, for the champion if it is the policy of this workspace.
        now: What ages are counted to.

    Raises:
        RlhfError: The registry does not answer.
    """
    if not has_record(workspace):
        return RegistryStatus([])
    client = connect(workspace)
    policies = versions(client, config.policy)
    aliases = read_aliases(client, config.policy)
    lines = [_versions_line(config.policy, len(policies), aliases)]
    champion = next((v for v in policies if str(v.version) == aliases.get(CHAMPION)), None)
    if champion is not None:
        lines.append(f"  {_describe_champion(workspace, champion, policies, stale_stages, now)}")
    decisions = [d for d in read_decisions(workspace) if d.get("model") == config.policy]
    if decisions:
        lines.append(f"  last decision: {_describe_decision(decisions[-1])}")
    elif challenger_reason := _recorded_reason(policies, aliases.get(CHALLENGER)):
        lines.append(f"  last decision: {challenger_reason}")
    awaiting, waiting_lines = _waiting_for_approval(client, config.policy) if policies else ("", [])
    lines += waiting_lines
    rewards = versions(client, config.reward_model)
    lines.append(_versions_line(config.reward_model, len(rewards), read_aliases(client, config.reward_model)))
    transaction = pending(client, config)
    action = "" if transaction is None else transaction.action
    if action:
        lines.append(f"a {action} was interrupted; the next promote, rollback, run or chat completes it")
    decided = _time_of(decisions[-1]) if decisions else None
    return RegistryStatus(lines, None if champion is None else str(champion.version), action, decided, awaiting)


def _waiting_for_approval(client: MlflowClient, model: str) -> tuple[str, list[str]]:
    """The version that waits for approval, and the line that says so; a history that is damaged has a line too."""
    try:
        request = latest_request(model, read_history(client, model))
    except RlhfError as error:
        return "", [f"  {error}"]
    if request is None or not request.is_open:
        return "", []
    since = datetime.fromisoformat(request.asked_at).astimezone()
    line = f"  waits for approval: v{request.challenger}, since {since:%Y-%m-%d %H:%M}, requested by {request.asked_by}"
    return request.challenger, [line]


def _versions_line(name: str, count: int, numbers: dict[str, str]) -> str:
    if not count:
        return f"{name}: no version yet"
    aliases = ", ".join(f"@{alias} v{numbers[alias]}" for alias in (CHAMPION, CHALLENGER, PREVIOUS) if alias in numbers)
    return f"{name}: {count} version{'s' if count > 1 else ''}; {aliases or 'no alias'}"


def _describe_champion(
    workspace: Path, champion: ModelVersion, policies: list[ModelVersion], stale_stages: int, now: datetime
) -> str:
    """Say how old the champion is, and whether it is the policy that this workspace has now."""
    age = format_age(now.timestamp() - champion.creation_timestamp / 1000)
    head = f"champion v{champion.version}, registered {age}"
    folder = workspace / POLICY_FOLDER
    if not folder.is_dir():
        return f"{head}; this workspace has no {POLICY_FOLDER}"
    content = sha256_tree(folder)
    if champion.tags.get(CONTENT_TAG) == content:
        stale = f", {stale_stages} of whose stages are stale" if stale_stages else ""
        return f"{head}: it is the policy of this workspace{stale}"
    same = next((str(v.version) for v in policies if v.tags.get(CONTENT_TAG) == content), None)
    here = f"is v{same}" if same else "is not registered"
    return f"{head}: it is not the policy of this workspace, which {here}"


def _describe_decision(decision: dict[str, Any]) -> str:
    moment = f"{_time_of(decision):%Y-%m-%d %H:%M}"
    if decision["action"] == "rollback":
        return f"{moment}, v{decision['replaced']} rolled back to v{decision['champion']}: {decision['reason']}"
    verb = "promoted" if decision["promoted"] else "not promoted"
    verb = "waits for approval" if decision.get("awaiting_approval") else verb
    return f"{moment}, v{decision['challenger']} {verb}: {decision['reason']}"


def _time_of(decision: dict[str, Any]) -> datetime:
    """When a decision was made, in local time."""
    return datetime.fromisoformat(decision["time"]).astimezone().replace(tzinfo=None)


def _recorded_reason(policies: list[ModelVersion], number: str | None) -> str:
    """The reason that the challenger is tagged with, for a decision that was made in another workspace."""
    version = next((v for v in policies if str(v.version) == number), None)
    reason = "" if version is None else version.tags.get("decision.reason", "")
    return f"v{number}, {reason}" if reason else ""

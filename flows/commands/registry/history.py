"""``rlhf history``: what was decided on a registered model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.registry.aliases import CHAMPION, read_aliases, registered_model
from flows.registry.client import connect
from flows.registry.decisions import report_name
from flows.registry.history import read_history
from flows.registry.session import TAKE_OVER
from flows.registry.workspace import printed_line
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError


def describe_history(workspace: Path, model: str | None = None) -> str:
    """List who changed what when and why, oldest first, and whether the champion is the one that the history ends with.

    Args:
        model: Name of the registered model; default: the policy of ``workspace``.

    Raises:
        RlhfError: The model is unknown, or its history cannot be read.
    """
    name = model or load_section(workspace, "registry", RegistryConfig).policy
    client = connect(workspace)
    records = read_history(client, name, registered_model(client, name))
    if not records:
        raise RlhfError(f"{name} has no history yet; it begins with the first version that becomes challenger")
    lines = [line for record in records for line in _describe(record, name)]
    recorded = last_champion(records, name)
    champion = read_aliases(client, name).get(CHAMPION)
    if recorded != champion:
        lines.append(
            f"the champion is {_version(champion)}, but the history ends with {_version(recorded)}: @{CHAMPION} was "
            "moved by something else than rlhf"
        )
    return "\n".join(lines)


def last_champion(records: Sequence[Mapping[str, Any]], model: str) -> str | None:
    """The version that the history says is champion, None if it says nothing of one."""
    moved = [
        move["version"]
        for record in records
        for move in record["moves"]
        if move["model"] == model and move["alias"] == CHAMPION
    ]
    return moved[-1] if moved else None


def _version(number: str | None) -> str:
    return "none" if number is None else f"version {number}"


def _describe(record: Mapping[str, Any], model: str) -> list[str]:
    """One line on what happened, one on why, and one on the evidence where there is a report."""
    moves = [
        f"{'' if move['model'] == model else move['model'] + ' '}@{move['alias']} → {move['version'] or 'none'}"
        for move in record["moves"]
    ]
    moves += ["owner"] if record["action"] == TAKE_OVER else []
    when = str(record["time"])[:19].replace("T", " ")
    about = ", ".join(moves) or (f"version {record['decided_on']}" if record["decided_on"] else "versions")
    lines = [
        f"{record['number']}  {when} UTC  {printed_line(str(record['who'] or 'unknown'))}  {record['action']}: {about}",
        f"   why: {printed_line(str(record['reason']))}",
    ]
    if record["decision"]:
        lines.append(
            f"   evidence: {report_name(record['decision'], record['id'])}, attached to the run that "
            f"registered version {record['decided_on']}"
        )
    return lines

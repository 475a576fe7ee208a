"""Which stages DVC finds changed, and what changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.dvc_repo.query import query
from rlhf_core.errors import RlhfError


def dvc_status(workspace: Path, stages: Sequence[str] = ()) -> dict[str, Any]:
    """``dvc status`` as ``{stage: [what changed, …]}``, empty when all is up to date; ``RlhfError`` if DVC fails."""
    printed, complaint = query(workspace, "-m", "dvc", "status", "--json", *stages)
    if complaint:
        raise RlhfError(f"dvc status failed in {workspace}: {complaint}")
    status: dict[str, Any] = json.loads(printed or "{}")
    return status


def describe_changes(changes: Any) -> str:
    """``models/policy modified, metrics/ppo.json deleted`` out of one stage's entry of ``dvc status``."""
    found = []
    for change in changes:
        if not isinstance(change, dict):
            found.append(str(change))
            continue
        for what in change.values():
            items = what.items() if isinstance(what, dict) else [(str(what), "")]
            for path, state in items:
                if isinstance(state, dict):
                    found += [f"{path}:{key} {word}" for key, word in state.items()]
                else:
                    found.append(f"{path} {state}".strip())
    return ", ".join(found)

"""Which stages DVC finds changed, and what changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.supervision.python_module import run_module
from rlhf_core.errors import RlhfError


def dvc_status(workspace: Path, stages: Sequence[str] = ()) -> dict[str, Any]:
    """Return ``dvc status`` as ``{stage: [change, …]}``, empty when everything is up to date.

    Raises:
        RlhfError: DVC fails.
    """
    result = run_module(workspace, "dvc", "status", "--json", *stages)
    if result.exit_code:
        raise RlhfError(f"dvc status failed in {workspace}: {result.error_line}")
    status: dict[str, Any] = json.loads(result.stdout or "{}")
    return status


def describe_changes(changes: Any) -> str:
    """Describe one stage's entry of ``dvc status``: ``models/policy modified, metrics/ppo.json deleted``."""
    descriptions = []
    for change in changes:
        if not isinstance(change, dict):
            descriptions.append(str(change))
            continue
        for details in change.values():
            states = details.items() if isinstance(details, dict) else [(str(details), "")]
            for path, state in states:
                if isinstance(state, dict):
                    descriptions += [f"{path}:{key} {key_state}" for key, key_state in state.items()]
                else:
                    descriptions.append(f"{path} {state}".strip())
    return ", ".join(descriptions)

"""The champion of a workspace as whoever talks to it gets it."""

from __future__ import annotations

from pathlib import Path

from flows.registry.stored_models import policy_with_alias, verified_folder


def champion_folder(workspace: Path) -> Path:
    """Its folder, verified, after an interrupted promotion was completed."""
    return verified_folder(workspace.resolve(), policy_with_alias(workspace))

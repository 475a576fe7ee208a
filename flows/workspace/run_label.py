"""The names of a workspace and its runs on the Prefect server and in MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

SEPARATOR = " · "


def workspace_slug(workspace: Path) -> str:
    """Return the name of the workspace as names on a server carry it: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", workspace.resolve().name.lower()).strip("-") or "workspace"


def run_label(workspace: Path, profile: str, started: datetime) -> str:
    """Return ``WORKSPACE · PROFILE · TIME``; the profile is left out where it is unknown or the workspace's name."""
    name = workspace.resolve().name
    parts = [name, profile if profile != name else "", f"{started:%Y-%m-%d %H:%M:%S}"]
    return SEPARATOR.join(part for part in parts if part)


def job_label(workspace: str, stage: str) -> str:
    """Return the name of a flow run that computes one stage: ``WORKSPACE · STAGE``."""
    return SEPARATOR.join([Path(workspace).name, stage])


def run_tags(workspace: Path, profile: str) -> Mapping[str, str]:
    """Return what a person looks for a run by."""
    return {"workspace": workspace.resolve().name} | ({"profile": profile} if profile else {})

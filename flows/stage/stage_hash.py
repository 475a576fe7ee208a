"""What a stage is about to compute, as a hash: equal hashes mean the same result, and the same place it is kept in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flows.dvc_repo.graph import StageNode
from flows.dvc_repo.lock_file import recorded_hashes
from rlhf_core.config.loading.yaml_text import plain, read
from rlhf_core.errors import ConfigError
from rlhf_core.files import sha256_file, sha256_tree

YAML_SUFFIXES = (".yaml", ".yml")


def stage_hash(workspace: Path, node: StageNode) -> str | None:
    """Hash of the stage's command, parameters, inputs (code fingerprint included), outputs, and of its DVC cache.

    The hashes of inputs that other stages make are those of dvc.lock, so ask after those stages are up to date. None
    when two workspaces could not share the result: an input is missing, or DVC's run cache does not take the stage.
    """
    if not node.shareable:
        return None
    try:
        recorded = recorded_hashes(workspace)
        params = {file: _params(workspace / file, names) for file, names in node.params.items()}
    except (ConfigError, OSError):
        return None
    inputs = {dep: recorded.get(dep) or _content(workspace / dep) for dep in node.inputs}
    if None in inputs.values():
        return None
    parts = [node.name, node.command, params, inputs, sorted(node.outputs), node.cache]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _params(file: Path, names: list[str]) -> Any:
    """The named values of a parameter file (all of them when none is named); of another format, its content's hash."""
    if file.suffix not in YAML_SUFFIXES:
        return sha256_file(file)
    document = plain(read(file))
    return {name: _value(document, name) for name in sorted(names)} if names else document


def _value(document: Any, name: str) -> Any:
    for part in name.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def _content(path: Path) -> str | None:
    return sha256_tree(path) if path.exists() else None

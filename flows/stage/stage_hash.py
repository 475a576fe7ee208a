"""A hash of what a stage is about to compute: equal hashes mean the same result in the same DVC cache."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flows.dvc_repo.graph import StageNode
from flows.dvc_repo.lock_file import recorded_hashes
from rlhf_core.config.loading.yaml_text import plain, read
from rlhf_core.errors import ConfigError
from rlhf_core.storage.files import sha256_file, sha256_tree

YAML_SUFFIXES = (".yaml", ".yml")


def stage_hash(workspace: Path, node: StageNode) -> str | None:
    """Hash the stage's command, parameters, inputs (code fingerprint included), outputs and DVC cache.

    The hashes of inputs that other stages make are those of dvc.lock, so those stages must be up to date.

    Returns:
        The hash; None when the result cannot be shared, because an input is missing or DVC's run cache does not keep
        the stage.
    """
    if not node.shareable:
        return None
    try:
        recorded = recorded_hashes(workspace)
        params = {file: _param_values(workspace / file, names) for file, names in node.params.items()}
    except (ConfigError, OSError):
        return None
    inputs = {}
    for path in node.inputs:
        if path not in recorded and not (workspace / path).exists():
            return None
        inputs[path] = recorded.get(path) or sha256_tree(workspace / path)
    parts = [node.name, node.command, params, inputs, sorted(node.outputs), node.cache]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _param_values(file: Path, names: list[str]) -> Any:
    """Return the named values of a YAML file, all if none is named; of a file in another format, its hash."""
    if file.suffix not in YAML_SUFFIXES:
        return sha256_file(file)
    document = plain(read(file))
    return {name: _value_at(document, name) for name in sorted(names)} if names else document


def _value_at(document: Any, dotted_name: str) -> Any:
    for part in dotted_name.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document

"""Reads whatever a run has left so far; what is missing or unreadable is told, never guessed."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_core.data.schema import read_table
from rlhf_core.errors import DataError
from rlhf_core.files import read_json, sha256_file

STAGES = ("data", "sft", "reward", "referee", "critic", "ppo", "evaluation")
GATES = ("data", "reward", "policy")
HISTORIES = ("sft", "reward", "referee", "critic", "ppo")
# What a shut gate keeps from running. Files of these that lie around are from an earlier run.
BEHIND = {
    "data": ("sft", "reward", "referee", "critic", "ppo", "evaluation", "policy"),
    "reward": ("critic", "ppo", "evaluation", "policy"),
}


@dataclass
class Sources:
    """Everything the report may show. ``missing`` maps a part's name to the reason why it is not here."""

    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    histories: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    bad_cases: list[dict[str, Any]] = field(default_factory=list)
    images: list[tuple[str, str]] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    params: str = ""
    missing: dict[str, str] = field(default_factory=dict)


def load(inputs: Mapping[str, Path], params: Path | None = None) -> Sources:
    """Read all inputs that exist. Keys: ``NAME_metrics``, ``NAME_gate``, ``NAME_history``, ``comparisons``,
    ``bad_cases``, ``reward_plots`` (a folder of PNG files)."""
    found = Sources()
    for name in GATES:
        _json(found, found.gates, name, inputs.get(f"{name}_gate"), f"{name} gate")
    stale = _stale(found)
    for name in STAGES:
        _json(found, found.metrics, name, inputs.get(f"{name}_metrics"), f"{name} metrics", stale.get(name))
    for name in HISTORIES:
        path = None if name in stale else inputs.get(f"{name}_history")
        found.histories[name] = _lines(path)
    if "policy" in stale and "policy" in found.gates:
        del found.gates["policy"]
        found.missing["policy gate"] = stale["policy"]
    if "evaluation" not in stale:
        found.comparisons = _rows(found, inputs.get("comparisons"))
        found.bad_cases = _lines(inputs.get("bad_cases"))
    found.images = [] if "reward" in stale else _images(inputs.get("reward_plots"))
    if params is not None and params.is_file():
        found.params = params.read_text(encoding="utf-8")
    found.hashes |= {f"{path.parent.name}/{path.name}": sha256_file(path) for path in inputs.values() if path.is_file()}
    return found


def shut_gate(found: Sources) -> str | None:
    """The first enforced gate whose conditions failed."""
    for name in GATES:
        gate = found.gates.get(name)
        if gate and not gate.get("passed") and gate.get("mode", "enforce") == "enforce":
            return name
    return None


def _stale(found: Sources) -> dict[str, str]:
    shut = shut_gate(found)
    return dict.fromkeys(BEHIND.get(shut or "", ()), f"not run: the {shut} gate failed")


def _json(
    found: Sources,
    into: dict[str, dict[str, Any]],
    name: str,
    path: Path | None,
    label: str,
    stale: str | None = None,
) -> None:
    if stale:
        found.missing[label] = stale
        return
    if path is None or not path.is_file():
        found.missing[label] = "not there yet"
        return
    try:
        value = read_json(path)
    except DataError as error:
        found.missing[label] = str(error)
        return
    if isinstance(value, dict):
        into[name] = value
    else:
        found.missing[label] = f"{path.name} does not hold an object"


def _lines(path: Path | None) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file; a last line cut short by a crash is left out."""
    if path is None or not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _rows(found: Sources, path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.is_file():
        return []
    try:
        return read_table(path).to_pylist()
    except (DataError, pa.ArrowException) as error:
        found.missing["comparisons"] = str(error)
        return []


def _images(folder: Path | None) -> list[tuple[str, str]]:
    """(caption, data URI) of each PNG or SVG in the folder."""
    if folder is None or not folder.is_dir():
        return []
    kinds = {".png": "image/png", ".svg": "image/svg+xml"}
    found = []
    for file in sorted(file for file in folder.iterdir() if file.suffix in kinds):
        content = base64.b64encode(file.read_bytes()).decode()
        found.append((file.stem.replace("_", " "), f"data:{kinds[file.suffix]};base64,{content}"))
    return found

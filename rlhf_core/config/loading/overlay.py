"""Profiles and ``--set``: changes laid over params.yaml, comments kept, every path checked before it is written."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import check_params
from rlhf_core.config.loading.pretrained import PROFILE
from rlhf_core.config.problems import nearest
from rlhf_core.config.stages.base import SCRATCH, is_pretrained
from rlhf_core.errors import ConfigError
from rlhf_core.storage.file_patterns import is_url

DEFAULT_PROFILE = "demo"
OWN_ANNOTATIONS = "data/annotations/"


def profiles(folder: Path) -> dict[str, Path]:
    """Profile names and files; ``demo`` is the base file itself when it has no overlay of its own."""
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def profile_text(folder: Path, name: str) -> str:
    """The overlay of profile ``name``; ``ConfigError`` with the nearest name when there is none."""
    known = profiles(folder)
    if name in known:
        return known[name].read_text(encoding="utf-8")
    raise ConfigError(f"no profile '{name}'; {nearest(name, known)}")


def merge(base: str, overlays: Sequence[tuple[str, str]] = (), sets: Sequence[str] = ()) -> str:
    """:func:`overlaid`, checked as a whole: ``ConfigError`` names the first path that is unknown or wrong."""
    text = overlaid(base, overlays, sets)
    check_params(yaml_text.parse(text, "params.yaml"), "parameters")
    return text


def overlaid(base: str, overlays: Sequence[tuple[str, str]] = (), sets: Sequence[str] = ()) -> str:
    """``base`` with each ``(name, text)`` overlay and each ``section.key=value`` applied in turn, unchecked.

    Returns YAML text with the comments of ``base``.
    """
    document = yaml_text.parse(base, "params.yaml")
    for name, text in overlays:
        overlay = yaml_text.parse(text, name)
        _merge_into(document, overlay)
    for assignment in sets:
        _put(document, *parse_assignment(assignment))
    return yaml_text.dump(document)


def overlays_of(base: str, folder: Path, profile: str | None, sets: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The overlays for :func:`merge`: the profile, and ``pretrained`` beneath it where ``sets`` choose such a model.

    A base that trains a pretrained model already, or a profile that chooses one, has settings of its own.

    Args:
        base: Text of the params.yaml that is changed.
        folder: The profiles.
        profile: Name of the profile, if there is one.
        sets: ``section.key=value`` overrides.
    """
    overlays = [(f"profile {profile}", profile_text(folder, profile))] if profile else []
    chosen = [value for path, value in map(parse_assignment, sets) if path == "base.source"]
    documents = [yaml_text.parse(base, "params.yaml"), *(yaml_text.parse(text, name) for name, text in overlays)]
    sources = [str((document.get("base") or {}).get("source", SCRATCH)) for document in documents]
    if chosen and is_pretrained(str(chosen[-1])) and not any(map(is_pretrained, sources)):
        overlays.insert(0, (f"profile {PROFILE}", profile_text(folder, PROFILE)))
    return overlays


def parse_assignment(assignment: str) -> tuple[str, Any]:
    """Path and value of ``section.key=value``; ``ConfigError`` when it is not one."""
    path, separator, value = assignment.partition("=")
    if not separator or not path.strip():
        raise ConfigError(f"--set {assignment}: write it as section.key=value, such as --set ppo.iterations=20")
    return path.strip(), yaml_text.parse_scalar(value)


def overridden(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter document with ``{"section.key": value}`` applied. Nothing is checked here."""
    changed = copy.deepcopy(dict(document))
    for path, value in changes.items():
        _put(changed, path, copy.deepcopy(value))
    return changed


def rebase_sources(text: str, origin: Path, target: Path) -> str:
    """``text`` with its relative paths, written for ``origin``, made right for ``target``.

    These are the paths of data, evaluation, verifiable and multiple-choice files, of opponents' replies, of the
    starting model, of the tokenizer to count with and of reward sources. A workspace's own ``models/`` and
    ``data/annotations/`` stay its own.
    """
    document = yaml_text.parse(text, "params.yaml")
    collect, evaluate = document.get("collect") or {}, document.get("evaluate") or {}
    verifiable, multiple_choice = evaluate.get("verifiable") or {}, evaluate.get("multiple_choice") or {}
    if collect.get("annotations") and not collect["annotations"].startswith(OWN_ANNOTATIONS):
        collect["annotations"] = _rebase_file(collect["annotations"], origin, target)
    if verifiable:
        verifiable["path"] = _rebase_file(str(verifiable.get("path")), origin, target)
    files = collect.get("files") or {}
    questions = [multiple_choice.get(key) for key in ("files", "few_shot_files")]
    opponents = evaluate.get("opponents")
    for sources in [*files.values(), (document.get("validate") or {}).get("evaluation_files"), *questions, opponents]:
        for position, source in enumerate(sources or []):
            entries, key = (source, "path") if isinstance(source, dict) else (sources, position)
            entries[key] = _rebase_file(str(entries[key]), origin, target)
    validate = document.get("validate") or {}
    if validate.get("tokenizer"):
        validate["tokenizer"] = _rebase_model(validate["tokenizer"], origin, target)
    base = document.get("base") or {}
    if is_pretrained(str(base.get("source", SCRATCH))):
        base["source"] = _rebase_model(base["source"], origin, target)
    for reward_source in ((document.get("ppo") or {}).get("reward") or {}).get("sources") or []:
        for key in reward_source.keys() & {"path", "model"}:
            reward_source[key] = _rebase_model(reward_source[key], origin, target)
        if "paths" in reward_source:
            reward_source["paths"] = [_rebase_model(path, origin, target) for path in reward_source["paths"]]
    return yaml_text.dump(document)


def _rebase_file(path: str, origin: Path, target: Path) -> str:
    """A relative path or glob, seen from ``target``; hub ids, URLs and absolute paths stay."""
    if path.startswith(("hub:", "~")) or is_url(path) or os.path.isabs(path):
        return path
    return os.path.relpath(origin / path, target)


def _rebase_model(path: str, origin: Path, target: Path) -> str:
    """A folder or file that exists at ``origin``, seen from ``target``; anything else may be a hub id and stays."""
    if path.startswith(("models/", "~")) or os.path.isabs(path) or not (origin / path).exists():
        return path
    moved = os.path.relpath(origin / path, target)
    return f"./{moved}" if moved.startswith("models/") else moved


def workspace_name(profile: str, sets: Sequence[str]) -> str:
    """Folder name of the workspace of a profile and its overrides: the same for the same, whatever their order."""
    if not sets:
        return profile
    digest = hashlib.sha256("\n".join(sorted(sets)).encode()).hexdigest()[:8]
    return f"{profile}-{digest}"


def _merge_into(target: Any, overlay: Any) -> None:
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge_into(target[key], value)
        else:
            target[key] = value


def _put(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    parent = document
    for part in parents:
        if not isinstance(parent.get(part), dict):
            parent[part] = {}
        parent = parent[part]
    parent[last] = value

"""Profiles and single settings, laid over params.yaml."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config import yaml_text
from rlhf_core.config.base import PRETRAINED_PROFILE, SCRATCH, is_pretrained
from rlhf_core.config.loading import PARAMS_FILE, check_params
from rlhf_core.config.problems import nearest
from rlhf_core.errors import ConfigError

DEFAULT_PROFILE = "demo"


def profiles(folder: Path) -> dict[str, Path]:
    """Return the file of each profile by its name."""
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def profile_names(profile: str | None) -> list[str]:
    """Return the names in a text such as ``own-data,8x80gb``; none where it is None."""
    if not profile:
        return []
    return [name.strip() for name in profile.split(",")]


def profile_text(folder: Path, name: str, below: tuple[str, ...] = ()) -> str:
    """Return the overlay of a profile, laid over that of the profile it ``extends``.

    Args:
        below: The profiles that extend this one.

    Raises:
        ConfigError: There is no such profile (the nearest name is given), or one extends itself.
    """
    known = profiles(folder)
    if name not in known:
        raise ConfigError(f"no profile '{name}'; {nearest(name, known)}")
    if name in below:
        raise ConfigError(
            f"profile '{name}' extends itself, by {', '.join(below)}; take one line 'extends' out"
        )
    text = known[name].read_text(encoding="utf-8")
    document = yaml_text.parse(text, f"profile {name}")
    if "extends" not in document:
        return text
    extended = profile_text(folder, str(document.pop("extends")), (*below, name))
    return overlaid(extended, [(f"profile {name}", yaml_text.dump(document))])


def merge(base: str, overlays: Sequence[tuple[str, str]] = (), sets: Sequence[str] = ()) -> str:
    """Return :func:`overlaid`'s text, checked as a whole.

    Raises:
        ConfigError: A path is unknown, or its value is wrong.
    """
    text = overlaid(base, overlays, sets)
    check_params(yaml_text.parse(text, PARAMS_FILE), "parameters")
    return text


def overlaid(base: str, overlays: Sequence[tuple[str, str]] = (), sets: Sequence[str] = ()) -> str:
    """Apply overlays, then single settings to ``base``, and check nothing.

    Args:
        base: Text of a params.yaml.
        overlays: Name and YAML text of each overlay, a later one over those before it.
        sets: Single settings, as ``section.key=value``.

    Returns:
        YAML text with the comments of ``base``. What an overlay changes has the overlay's comment, for
        the other one may tell why the value was what it was.
    """
    document = yaml_text.parse(base, PARAMS_FILE)
    for name, text in overlays:
        _merge_into(document, yaml_text.parse(text, name))
    for assignment in sets:
        path, value = parse_assignment(assignment)
        _put(document, path, value)
    return yaml_text.dump(document)


def overlays_of(
    base: str, folder: Path, profile: str | None, sets: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Return the overlays of a profile, and ``pretrained`` beneath it where ``sets`` need that.

    They do where they choose a pretrained model, unless the base trains one already or a profile
    chooses one: such a base or profile has settings of its own.

    Args:
        base: Text of the params.yaml that is changed.
        folder: The profiles.
        profile: Name of the profile, or several, as in ``own-data,8x80gb``, a later one over those
            before it.
        sets: ``section.key=value`` overrides.
    """
    overlays = [(f"profile {name}", profile_text(folder, name)) for name in profile_names(profile)]
    chosen = SCRATCH
    for path, value in map(parse_assignment, sets):
        if path == "base.source":
            chosen = str(value)
    if not is_pretrained(chosen):
        return overlays
    for name, text in [(PARAMS_FILE, base), *overlays]:
        section = yaml_text.parse(text, name).get("base") or {}
        if is_pretrained(str(section.get("source", SCRATCH))):
            return overlays
    suitable = profile_text(folder, PRETRAINED_PROFILE)
    return [(f"profile {PRETRAINED_PROFILE}", suitable), *overlays]


def parse_assignment(assignment: str) -> tuple[str, Any]:
    """Return path and value of ``section.key=value``; anything else is a ``ConfigError``."""
    path, separator, value = assignment.partition("=")
    if not separator or not path.strip():
        raise ConfigError(
            f"--set {assignment}: write it as section.key=value, such as --set ppo.iterations=20"
        )
    text = value.strip()
    if " #" in f" {text}" and text[0] not in "\"'[{|>":
        return path.strip(), text  # a command line has no comments
    return path.strip(), yaml_text.parse_scalar(value)


def overridden(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a document with each ``{"section.key": value}`` set, and check nothing."""
    changed = copy.deepcopy(dict(document))
    for path, value in changes.items():
        _put(changed, path, copy.deepcopy(value))
    return changed


def workspace_name(profile: str, sets: Sequence[str]) -> str:
    """Name the workspace of a profile and its overrides, whatever the order of these."""
    name = "-".join(profile_names(profile))
    if not sets:
        return name
    digest = hashlib.sha256("\n".join(sorted(sets)).encode()).hexdigest()[:8]
    return f"{name}-{digest}"


def _merge_into(target: Any, overlay: Any) -> None:
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge_into(target[key], value)
        elif key not in target or target[key] != value:
            yaml_text.take_over(target, key, overlay)


def _put(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    parent = document
    for part in parents:
        if not isinstance(parent.get(part), dict):
            parent[part] = {}
        parent = parent[part]
    parent[last] = value

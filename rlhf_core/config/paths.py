"""Relative paths in params.yaml, made right for another folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config import yaml_text
from rlhf_core.config.base import is_pretrained
from rlhf_core.config.loading import PARAMS_FILE
from rlhf_core.storage.data_files import is_url

# What the stages of a workspace write.
OWN_MODELS = {
    "models/base",
    "models/sft",
    "models/reward",
    "models/referee",
    "models/judge",
    "models/critic",
    "models/policy",
}
ANNOTATIONS, OWN_ANNOTATIONS = "collect.annotations", "data/annotations/"
# Settings whose relative paths start at the workspace, `*` for any key or entry: first those of
# files, then those that may also be a hub id or a command.
FILES = (
    ANNOTATIONS, "collect.files.*.*.path", "validate.evaluation_files.*.path", "evaluate.verifiable.path",
    "evaluate.multiple_choice.files.*", "evaluate.multiple_choice.few_shot_files.*", "evaluate.opponents.*.path",
    "compute.launch.*.deepspeed", "registry.signature.public_key", "registry.signature.earlier_public_keys.*",
    "registry.signature.certificates.*",
    "ppo.sampler.weights_folder", "evaluate.sampler.weights_folder", "checkpoints.store",
)  # fmt: skip
STARTING_MODEL, TOKENIZER = "base.source", "validate.tokenizer"
MODELS = (
    STARTING_MODEL, TOKENIZER, "ppo.reward.sources.*.path", "ppo.reward.sources.*.model",
    "ppo.reward.sources.*.paths.*", "ppo.sampler.python", "evaluate.sampler.python",
)  # fmt: skip


def rebase_sources(text: str, origin: Path, target: Path) -> str:
    """Return a params.yaml written for ``origin`` with its relative paths made right for ``target``.

    A workspace's own ``data/annotations/`` stay its own, and so do its own models except for the
    starting model and the tokenizer, which come before any model of its own.
    """
    document = yaml_text.parse(text, PARAMS_FILE)
    for setting in FILES:
        for entries, key in _texts_at(document, setting.split(".")):
            is_own = setting == ANNOTATIONS and entries[key].startswith(OWN_ANNOTATIONS)
            if not is_own:
                entries[key] = _rebase_file(entries[key], origin, target)
    for setting in MODELS:
        for entries, key in _texts_at(document, setting.split(".")):
            folder = "/".join(entries[key].split("/")[:2])
            is_own = setting not in (STARTING_MODEL, TOKENIZER) and folder in OWN_MODELS
            if is_pretrained(entries[key]) and not is_own:
                entries[key] = _rebase_model(entries[key], origin, target)
    return yaml_text.dump(document)


def _texts_at(node: Any, keys: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield what holds each text at a dotted setting, and its key there.

    A data source may be a text itself, or a mapping with a path.
    """
    head, *rest = keys
    if isinstance(node, list):
        held: dict[Any, Any] = dict(enumerate(node))
    elif isinstance(node, dict):
        held = dict(node)
    else:
        return
    chosen = list(held) if head == "*" else [head]
    for key in chosen:
        value = held.get(key)
        if isinstance(value, str) and rest in ([], ["path"]):
            yield node, key
        elif rest:
            yield from _texts_at(value, rest)


def _rebase_file(path: str, origin: Path, target: Path) -> str:
    """Return a relative path or glob as seen from ``target``; all else stays."""
    if path.startswith(("hub:", "~")) or is_url(path) or os.path.isabs(path):
        return path
    return os.path.relpath(origin / path, target)


def _rebase_model(path: str, origin: Path, target: Path) -> str:
    """Return an existing folder or file as seen from ``target``; all else may be a hub id."""
    # The folder may still have to be made, so that `..` in the path is not looked up.
    if path.startswith("~") or not os.path.exists(os.path.normpath(origin / path)):
        return path
    if os.path.isabs(path):
        return path
    moved = os.path.relpath(origin / path, target)
    if moved.startswith("..") or moved == path:
        return moved
    return f"./{moved}"  # else it would read as a hub id, or as a model of the workspace's own

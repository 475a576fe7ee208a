"""The fingerprints of stages, and the files in which DVC sees them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.files import atomic_write_text
from rlhf_core.fingerprint.reach import Package

PACKAGE = "rlhf_core"
FOLDER = ".fingerprints"
ROOTS = ("STAGE",)
# Reporting never changes a result, and neither do an interruption, the place of a checkpoint or what carries these: a
# new message or a new progress bar must not cost a training run.
_NAMES = (
    "errors",
    "preemption",
    "progress",
    "tracking",
    "training.checkpoints.location",
    "training.checkpoints.store",
    "training.run_context",
)
NEUTRAL = frozenset(f"{PACKAGE}.{name}" for name in _NAMES)


def stage_module_name(stage: str) -> str:
    """Module of a stage: ``gate-reward`` is in ``rlhf_core.stages.gate_reward``."""
    return f"{PACKAGE}.stages.{stage.replace('-', '_')}"


def fingerprint(stage: str) -> str:
    """Hex digest of all definitions that a stage reaches, and of the templates beside them."""
    return package().digest(stage_module_name(stage), *ROOTS)


def reached(stage: str) -> frozenset[str]:
    """Dotted names of the definitions that a stage reaches."""
    return frozenset(str(definition) for definition in package().reached(stage_module_name(stage), *ROOTS))


def write_fingerprints(workspace: Path, stages: Iterable[str]) -> None:
    """Refresh ``.fingerprints/STAGE.txt``; a file whose content would not change is left alone."""
    for stage in stages:
        path = workspace / FOLDER / f"{stage}.txt"
        text = fingerprint(stage) + "\n"
        if not path.exists() or path.read_text() != text:
            atomic_write_text(path, text)


@cache
def package() -> Package:
    """The installed package, parsed once in a process."""
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return Package(Path(next(iter(spec.submodule_search_locations))).parent, PACKAGE, NEUTRAL)

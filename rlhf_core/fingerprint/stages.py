"""The fingerprints of stages, and the files in which DVC sees them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.config.stages.policy import Method
from rlhf_core.fingerprint.reach import Package
from rlhf_core.storage.files import atomic_write_text
from rlhf_core.storage.garbage_collection import paused_collector

PACKAGE = "rlhf_core"
FOLDER = ".fingerprints"
ROOTS = ("STAGE",)
# Reporting never changes a result, and neither do an interruption, the place of a checkpoint or what carries these: a
# new message or a new progress bar must not cost a training run.
_NAMES = (
    "errors",
    "redaction",
    "runtime.preemption",
    "runtime.progress",
    "tracking",
    "tracking.delivery",
    "tracking.journal",
    "tracking.run_records",
    "tracking.stage_run",
    "tracking.tracker",
    "training.checkpoints.location",
    "training.checkpoints.store",
    "training.run_context",
)
NEUTRAL = frozenset(f"{PACKAGE}.{name}" for name in _NAMES)


def stage_module_name(stage: str, method: Method = "ppo") -> str:
    """Module of a stage: ``gate-reward`` is in ``rlhf_core.stages.gate_reward``.

    The stage ``ppo`` by another ``method`` is in a module that is named by it, such as ``policy_by_dpo``.
    """
    if stage == "ppo" and method != "ppo":
        stage = f"policy_by_{method}"
    return f"{PACKAGE}.stages.{stage.replace('-', '_')}"


def fingerprint(stage: str, method: Method = "ppo") -> str:
    """Hex digest of all definitions that a stage reaches, and of the templates beside them.

    Args:
        stage: Name of the stage.
        method: How the policy is trained, which decides what the stage ``ppo`` reaches.
    """
    with paused_collector():
        return package().digest(stage_module_name(stage, method), *ROOTS)


def reached(stage: str) -> frozenset[str]:
    """Dotted names of the definitions that a stage reaches."""
    return frozenset(str(definition) for definition in package().reached(stage_module_name(stage), *ROOTS))


def write_fingerprints(workspace: Path, stages: Iterable[str], method: Method = "ppo") -> None:
    """Refresh ``.fingerprints/STAGE.txt``; a file whose content would not change is left alone."""
    for stage in stages:
        path = workspace / FOLDER / f"{stage}.txt"
        text = fingerprint(stage, method) + "\n"
        if not path.exists() or path.read_text() != text:
            atomic_write_text(path, text)


@cache
def package() -> Package:
    """The installed package, parsed once in a process."""
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return Package(Path(next(iter(spec.submodule_search_locations))).parent, PACKAGE, NEUTRAL)

"""The fingerprints of stages, and the files in which DVC sees them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.config.policy import Method
from rlhf_core.fingerprint.reach import Package
from rlhf_core.storage.files import atomic_write_text
from rlhf_core.storage.garbage_collection import paused_collector

PACKAGE = "rlhf_core"
FOLDER = ".fingerprints"
# Stages that share a module; every other stage is the ``STAGE`` of a module of its own name.
BESIDE = {
    "gate-sft": ("gates", "GATE_SFT"),
    "gate-reward": ("gates", "GATE_REWARD"),
    "gate-policy": ("gates", "GATE_POLICY"),
    "referee": ("reward", "REFEREE"),
    "judge": ("reward", "JUDGE"),
}
# Reporting never changes a result, and neither do an interruption, the place of a checkpoint or
# what carries these: a new message or a new progress bar must not cost a training run.
_NAMES = (
    "errors",
    "redaction",
    "runtime.preemption",
    "runtime.progress",
    "secret_commands",
    "tracking",
    "tracking.delivery",
    "tracking.journal",
    "tracking.origin",
    "tracking.run_loggers",
    "tracking.stage_run",
    "training.checkpoints.store",
    "training.run_context",
)
NEUTRAL = frozenset(f"{PACKAGE}.{name}" for name in _NAMES)


def stage_definition(stage: str, method: Method = "ppo") -> tuple[str, str]:
    """Module and name of the definition of a stage: ``STAGE`` of ``rlhf_core.stages.sft``.

    The stage ``ppo`` by another ``method`` is in a module that is named by it, such as
    ``policy_by_dpo``.
    """
    if stage == "ppo" and method != "ppo":
        stage = f"policy_by_{method}"
    module, name = BESIDE.get(stage, (stage, "STAGE"))
    return f"{PACKAGE}.stages.{module}", name


def fingerprint(stage: str, method: Method = "ppo") -> str:
    """Return a digest of all definitions that a stage reaches, and of the templates beside them.

    Args:
        stage: Name of the stage.
        method: How the policy is trained, which decides what the stage ``ppo`` reaches.
    """
    with paused_collector():
        return package().digest(*stage_definition(stage, method))


def remembered_fingerprints(
    workspace: Path, stages: Iterable[str], method: Method
) -> dict[str, str]:
    """Return the :func:`fingerprint` of each stage, remembered in ``workspace`` or computed.

    To compute it takes seconds. ``.rlhf/fingerprints.json`` counts as long as no file of the
    package has changed.
    """
    memory = workspace / ".rlhf" / "fingerprints.json"
    known: dict[str, str] = {}
    state = _package_state(method)
    with suppress(OSError, ValueError):
        remembered = json.loads(memory.read_text(encoding="utf-8"))
        if remembered["state"] == state:
            known = remembered["digests"]
    digests = {}
    for stage in stages:
        digests[stage] = known.get(stage) or fingerprint(stage, method)
    if digests.keys() - known.keys():
        content = {"state": state, "digests": known | digests}
        atomic_write_text(memory, json.dumps(content))
    return digests


def write_fingerprints(workspace: Path, stages: Iterable[str], method: Method) -> None:
    """Refresh ``.fingerprints/STAGE.txt``; a file whose content would not change is left alone."""
    for stage, digest in remembered_fingerprints(workspace, stages, method).items():
        path = workspace / FOLDER / f"{stage}.txt"
        if not path.exists() or path.read_text() != f"{digest}\n":
            atomic_write_text(path, f"{digest}\n")


def _package_state(method: Method) -> str:
    """Return a digest of the method and of path, size and time of every file of the package."""
    root = _package_folder()
    marks = [method, str(root)]
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(folder, name)
            status = os.stat(path)
            marks.append(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ino}")
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()


def _package_folder() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def package() -> Package:
    """The installed package, parsed once in a process."""
    return Package(_package_folder().parent, PACKAGE, NEUTRAL)

"""The stages there are, in the order of the pipeline."""

from __future__ import annotations

import importlib
from typing import Any

from rlhf_core.config.policy import Method
from rlhf_core.config.problems import nearest
from rlhf_core.errors import ConfigError
from rlhf_core.fingerprint import stage_module_name
from rlhf_core.stages.runtime.contract import Stage
from rlhf_core.storage.garbage_collection import paused_collector

STAGES = (
    "collect",
    "validate",
    "base",
    "sft",
    "gate-sft",
    "reward",
    "referee",
    "judge",
    "gate-reward",
    "critic",
    "ppo",
    "evaluate",
    "gate-policy",
    "report",
)


def load_stage(name: str, method: Method = "ppo") -> Stage[Any]:
    """The stage called ``name``; ``ConfigError`` with the nearest name when there is none.

    Args:
        name: One of :data:`STAGES`.
        method: How the policy is trained. The stage ``ppo`` has a module for each method, so that a change of one does
            not train by another again.
    """
    if name not in STAGES:
        raise ConfigError(f"no stage '{name}'; {nearest(name, STAGES)}")
    with paused_collector():
        stage: Stage[Any] = importlib.import_module(stage_module_name(name, method)).STAGE
    return stage

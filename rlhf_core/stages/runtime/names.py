"""The stages there are, in the order of the pipeline."""

from __future__ import annotations

import importlib
from typing import Any

from rlhf_core.config.loading.problems import nearest
from rlhf_core.errors import ConfigError

STAGES = (
    "collect",
    "validate",
    "base",
    "sft",
    "reward",
    "referee",
    "gate-reward",
    "critic",
    "ppo",
    "evaluate",
    "gate-policy",
    "report",
)


def stage_module(name: str) -> Any:
    """The module of stage ``name``; ``ConfigError`` with the nearest name when there is none."""
    if name not in STAGES:
        raise ConfigError(f"no stage '{name}'; {nearest(name, STAGES)}")
    return importlib.import_module(f"rlhf_core.stages.{name.replace('-', '_')}")

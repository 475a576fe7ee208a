"""What a stage declares about itself, and the paths it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhf_core.config.model import StageConfig
from rlhf_core.config.policy import Method
from rlhf_core.training.run_context import RunContext

Config = TypeVar("Config", bound=StageConfig)


class Paths(dict[str, Path]):
    """Named paths with attribute access: ``inputs.clean``, ``outputs.model``."""

    def __getattr__(self, name: str) -> Path:
        if name not in self:
            raise AttributeError(f"no path named {name!r}; there are {', '.join(self)}")
        return self[name]


@dataclass(frozen=True)
class Stage(Generic[Config]):
    """One stage of the pipeline.

    dvc.yaml lists the same paths; a contract test compares the two.

    Attributes:
        config: The model that checks its section.
        beside: Further sections that ``config`` has as fields.
        run: Called with the parameters, input paths, output paths and the run's context; returns
            metrics. It writes the outputs.
        inputs: Paths relative to the workspace, by the names that ``run`` uses.
        outputs: The paths that ``run`` writes, likewise.
        optional_inputs: Names of inputs that may be missing on disk.
        method: Of the stage ``ppo``, the ``policy.method`` by which it trains the policy.
    """

    name: str
    config: type[Config]
    run: Callable[[Config, Paths, Paths, RunContext], Mapping[str, Any]]
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    optional_inputs: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    method: Method = "ppo"

    @property
    def section(self) -> str:
        """Its section of params.yaml, which ``config`` checks."""
        return "gates" if self.name.startswith("gate-") else self.name

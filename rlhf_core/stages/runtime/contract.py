"""What a stage declares about itself, and the paths it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.config.model import StageConfig


@dataclass(frozen=True)
class Stage:
    """A stage's name, its section of params.yaml with the model that checks it, and its files.

    ``inputs`` and ``outputs`` map the names used by ``run`` to paths relative to the workspace. An optional input may
    be missing on disk. dvc.yaml lists the same paths; a contract test compares the two.
    """

    name: str
    section: str
    config: type[StageConfig]
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    optional_inputs: frozenset[str] = frozenset()


class Paths(Mapping[str, Path]):
    """Named paths with attribute access: ``inputs.clean``, ``outputs.model``."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)

    def __getattr__(self, name: str) -> Path:
        try:
            return self.__dict__["_paths"][name]
        except KeyError:
            raise AttributeError(f"no path named {name!r}; there are {', '.join(self._paths)}") from None

    def __getitem__(self, name: str) -> Path:
        return self._paths[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

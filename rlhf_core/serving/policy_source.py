"""Where the served policy comes from: a folder, or a registry whose alias may move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from rlhf_core.config.model import SamplingConfig
from rlhf_core.errors import DataError
from rlhf_core.storage.files import read_json

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class PolicyRevision:
    """A policy whose weights never change.

    Attributes:
        id: Its name, such as ``rlhf-policy:3``.
        alias: A name that may mean another revision later, such as ``rlhf-policy@champion``; None
            for none.
    """

    id: str
    alias: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a request may ask for it."""
        return (self.id,) if self.alias is None else (self.id, self.alias)


@dataclass(frozen=True)
class PolicyFiles:
    """A Hugging Face folder, and the sampling that its replies were judged with."""

    folder: Path
    sampling: SamplingConfig


class PolicySource(Protocol):
    """Says which revision is to be served."""

    def latest(self) -> PolicyRevision:
        """Return the revision to serve now; raise ``RlhfError`` where that is unknown."""

    def files(self, revision: PolicyRevision) -> PolicyFiles:
        """Return the verified files of ``revision``; ``RlhfError`` if missing or changed."""


@dataclass(frozen=True)
class FolderSource:
    """A model folder. It is read once, so a change in it is served only by another server."""

    folder: Path
    sampling: SamplingConfig

    def latest(self) -> PolicyRevision:
        """Return the folder's own name."""
        return PolicyRevision(self.folder.resolve().name)

    def files(self, _: PolicyRevision) -> PolicyFiles:
        """Return the folder."""
        return PolicyFiles(self.folder, self.sampling)


def sampling_of_folder(folder: Path, default: SamplingConfig) -> SamplingConfig:
    """Return ``default`` with the settings that ``generation_config.json`` of ``folder`` names."""
    file = folder / GENERATION_CONFIG
    stored: Any = read_json(file) if file.is_file() else {}
    if not isinstance(stored, dict):
        raise DataError(f"{file} holds no JSON object; correct it, or take it out")
    given = {name: stored.get(name) for name in SamplingConfig.model_fields}
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingConfig.model_validate({**default.model_dump(), **settings})
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{file}: {name} is {settings.get(name)!r}; correct it or take it out"
        ) from error

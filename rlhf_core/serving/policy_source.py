"""Where the served policy comes from: a folder that stays what it is, or a registry whose alias may
move.
"""

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


FileStamps = tuple[tuple[str, int, int, int, int], ...]


def file_stamps(folder: Path) -> FileStamps:
    """Name, inode, size, and times of change of all files in ``folder``: what a write to one of
    them changes.

    Whoever writes cannot set the time of the inode's change back. Empty where files vanish
    meanwhile.
    """
    try:
        found = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    except OSError:
        return ()
    return tuple(
        (
            path.relative_to(folder).as_posix(),
            stat.st_ino,
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
        )
        for path, stat in found
    )


class PolicySource(Protocol):
    """Says which revision is to be served."""

    def latest(self) -> PolicyRevision:
        """The revision to serve now. Raises ``RlhfError`` where that cannot be said."""

    def files(self, revision: PolicyRevision) -> PolicyFiles:
        """The files of ``revision``, verified. Raises ``RlhfError`` where they are missing or
        changed.
        """


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
    settings = {
        name: stored[name] for name in SamplingConfig.model_fields if stored.get(name) is not None
    }
    try:
        return SamplingConfig.model_validate({**default.model_dump(), **settings})
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{file}: {name} is {settings.get(name)!r}; correct it or take it out"
        ) from error

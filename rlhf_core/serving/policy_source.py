"""A policy that answers requests: which revision of it, and its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.model import SamplingConfig


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

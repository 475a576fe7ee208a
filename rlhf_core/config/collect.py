"""Where data comes from: the synthetic world, or files and hub ids in any known format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, PositiveInt

from rlhf_core.config.model import StageConfig, Strict


class WorldConfig(Strict):
    """Sizes of the synthetic world, and parameters of its simulated annotators."""

    demonstrations: PositiveInt = 8000
    preferences: PositiveInt = 24000
    pretrain: PositiveInt = 4000
    contrast_share: float = Field(default=0.35, ge=0, le=1)
    label_sharpness: float = Field(default=2.5, gt=0)
    length_bias: float = 0.02


FormatName = Literal[
    "hh-rlhf",
    "sharegpt-ranking",
    "conversational-implicit",
    "conversational",
    "standard",
    "alpaca-ranking",
    "alpaca",
    "messages",
    "turn-list",
    "prompt-reply",
    "prompt",
    "text",
]


class DataSource(Strict):
    """A path, glob or hub id (``hub:owner/name[:split]``), and the format of its rows where that is not recognised."""

    path: str
    format: FormatName | None = None


class FileSources(Strict):
    """Paths, globs or hub ids, each with or without a format, by kind. Empty kinds are derived where that is possible:
    demonstrations from preferred replies, prompts from preferences, pretraining text from demonstrations."""

    preferences: tuple[str | DataSource, ...] = Field(default=(), strict=False)
    demonstrations: tuple[str | DataSource, ...] = Field(default=(), strict=False)
    prompts: tuple[str | DataSource, ...] = Field(default=(), strict=False)
    pretrain: tuple[str | DataSource, ...] = Field(default=(), strict=False)

    def of(self, kind: str) -> tuple[DataSource, ...]:
        """Return the sources of a kind."""
        listed: Sequence[str | DataSource] = getattr(self, kind)
        return tuple(DataSource(path=source) if isinstance(source, str) else source for source in listed)

    def paths(self) -> list[str]:
        """Return the paths, globs and hub ids of all kinds."""
        return [source.path for kind in type(self).model_fields for source in self.of(kind)]


class CollectConfig(StageConfig):
    source: Literal["world", "files"] = "world"
    world: WorldConfig = WorldConfig()
    files: FileSources = FileSources()
    limit: PositiveInt | None = None

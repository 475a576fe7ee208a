"""Where data comes from: the synthetic world, or files and hub ids in any known format."""

from __future__ import annotations

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


class FileSources(Strict):
    """Paths, globs or hub ids (``hub:owner/name[:split]``), by kind. Empty kinds are derived where that is possible:
    demonstrations from preferred replies, prompts from preferences, pretraining text from demonstrations."""

    preferences: tuple[str, ...] = Field(default=(), strict=False)
    demonstrations: tuple[str, ...] = Field(default=(), strict=False)
    prompts: tuple[str, ...] = Field(default=(), strict=False)
    pretrain: tuple[str, ...] = Field(default=(), strict=False)


class CollectConfig(StageConfig):
    source: Literal["world", "files"] = "world"
    world: WorldConfig = WorldConfig()
    files: FileSources = FileSources()
    limit: PositiveInt | None = None

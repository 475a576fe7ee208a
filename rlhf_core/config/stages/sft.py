"""Supervised fine-tuning (algorithms.md §1)."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from rlhf_core.config.model import CheckpointConfig, OptimizerConfig, SamplingConfig, StageConfig


class SftConfig(StageConfig):
    """``steps: 0`` keeps the base model as the SFT model, for one that is an instruct model already.

    ``max_tokens`` bounds prompt + reply; longer demonstrations are dropped and counted, never cut.
    """

    steps: NonNegativeInt = 550
    batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt | None = None
    max_tokens: PositiveInt = 256
    eval_every: PositiveInt = 100
    samples: PositiveInt = 8
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3)
    checkpoint: CheckpointConfig = CheckpointConfig(every=200)
    sampling: SamplingConfig = SamplingConfig()

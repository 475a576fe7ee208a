"""The starting model, and supervised fine-tuning (algorithms.md §1)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from rlhf_core.config.model import (
    CheckpointConfig,
    EpochLimit,
    OptimizerConfig,
    SamplingConfig,
    StageConfig,
    Strict,
)
from rlhf_core.config.ppo import PpoConfig

SCRATCH = "scratch"
PRETRAINED_PROFILE = "pretrained"  # whose settings suit a model that is loaded


class PretrainingConfig(Strict):
    """Training of the model that `scratch` makes, on plain texts, before it learns to answer.

    Attributes:
        steps: Optimiser steps.
        batch_size: Texts of a step.
        micro_batch_size: Texts of one pass, which changes no gradient; null: all of a step.
        max_tokens: Longest text; longer ones are dropped and counted, never cut.
        eval_every: Steps between measurements of held-out perplexity.
        optimizer: Its optimiser.
        checkpoint: Its checkpoints, in steps.
    """

    steps: PositiveInt
    batch_size: PositiveInt = 64
    micro_batch_size: PositiveInt | None = None
    max_tokens: PositiveInt = 256
    eval_every: PositiveInt = 100
    optimizer: OptimizerConfig = OptimizerConfig(lr=6e-3)
    checkpoint: CheckpointConfig = CheckpointConfig(every=200)


class BaseConfig(StageConfig):
    """The starting model, trained from nothing or loaded.

    Attributes:
        source: `scratch` makes a tokenizer and a tiny Llama; anything else is a folder, a `.gguf`
            file or a hub id.
        revision: Commit, tag or branch of a hub id.
        allow_high_learning_rates: Allows a pretrained model learning rates over 20 times 1e-5
            (adapters: 1e-4).
        vocab_size: Most entries of the tokenizer that `scratch` trains.
        hidden_size: Width of the Llama that `scratch` makes.
        intermediate_size: Width of its feed-forward layers.
        layers: Its decoder layers.
        heads: Its attention heads.
        max_positions: Longest sequence that it takes, in tokens.
        dtype: Precision of the weights; `auto` is bfloat16 where the device multiplies it natively,
            else float32.
        pretraining: How `scratch` trains on plain texts; null: its weights stay random.
    """

    source: str = SCRATCH
    revision: str | None = None
    allow_high_learning_rates: bool = False
    vocab_size: PositiveInt = 1024
    hidden_size: PositiveInt = 96
    intermediate_size: PositiveInt = 256
    layers: PositiveInt = 3
    heads: PositiveInt = 4
    max_positions: PositiveInt = 512
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    pretraining: PretrainingConfig | None = None


class BaseStageConfig(BaseConfig):
    """The stage's settings; of ``ppo`` only ``max_new_tokens`` and the adapters are read."""

    ppo: PpoConfig = PpoConfig()


def is_pretrained(source: str) -> bool:
    """Whether ``base.source`` names a model to load, rather than one that is made from nothing."""
    return source != SCRATCH


class SftConfig(StageConfig, EpochLimit):
    """Supervised fine-tuning on demonstrations.

    Attributes:
        steps: Optimiser steps; 0 keeps the base model as the SFT model, for one that is an instruct
            model already.
        max_epochs: At most so many passes over the demonstrations: of few, fewer steps are taken; null: no
            limit.
        batch_size: Demonstrations of a step.
        micro_batch_size: Demonstrations of one pass, which changes no gradient; null: all of a
            step.
        max_tokens: Longest prompt and reply together; longer demonstrations are dropped and
            counted, never cut.
        eval_every: Steps between measurements of held-out perplexity.
        samples: How many sample replies to held-out prompts are kept.
        optimizer: Its optimiser.
        checkpoint: Its checkpoints, in steps.
        sampling: How the sample replies are made.
    """

    steps: NonNegativeInt = 550
    batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt | None = None
    max_tokens: PositiveInt = 256
    eval_every: PositiveInt = 100
    samples: PositiveInt = 8
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every=200)
    sampling: SamplingConfig = SamplingConfig()

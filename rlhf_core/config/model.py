"""The base class of every parameter model, and the settings that several stages share."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent type changes such as ``"3"`` for ``3``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StageConfig(Strict):
    """Settings of one stage. ``seed`` comes from the top of params.yaml."""

    seed: int = Field(default=1, ge=0)


class OptimizerConfig(Strict):
    """AdamW and its learning-rate schedule.

    ``warmup`` is a share of all steps. ``cosine`` decays to ``final_ratio`` of the peak; ``inverse_sqrt`` is the
    schedule of MOSS-RLHF; ``constant`` stays at the peak after warm-up. ``max_grad_norm: null`` turns clipping off.
    """

    lr: PositiveFloat
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    warmup: float = Field(default=0.05, ge=0, le=1)
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    max_grad_norm: PositiveFloat | None = 1.0


class CheckpointConfig(Strict):
    """How often the partial state of a training run is saved, and how many saves are kept."""

    every: PositiveInt
    keep: PositiveInt = 2


class SamplingConfig(Strict):
    """Sampling at evaluation (paper, section 3.1 and appendix): never used for rollouts."""

    temperature: PositiveFloat = 0.8
    top_p: float = Field(default=0.9, gt=0, le=1)
    repetition_penalty: PositiveFloat = 1.1
    max_new_tokens: PositiveInt = 64


def changed_field(model: Strict, *names: str) -> str:
    """The first of the fields ``names`` that is not at its default, or an empty string.

    Values are compared, not what the file spells out, so that a profile may repeat a default.
    """
    return next((name for name in names if getattr(model, name) != type(model).model_fields[name].default), "")

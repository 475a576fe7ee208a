"""Low-rank adapters in place of training all weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rlhf_core.config.model import Strict


class LoraConfig(Strict):
    """LoRA (Hu et al. 2021): an adapted matrix W computes ``W x + alpha / rank * B A x``; only A and B are trained.

    ``targets`` are last names of linear layers, such as ``q_proj``; none means every linear layer below the head. There
    is no drop-out: it would make PPO's trainer disagree with its sampler.

    ``quantize: nf4`` holds the frozen linear layers in 4 bits (QLoRA, Dettmers et al. 2023). They stay rounded: the
    model that is saved has the weights it was trained and judged with, in its own precision again.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    targets: tuple[str, ...] = Field(default=(), strict=False)
    quantize: Literal["nf4"] | None = None

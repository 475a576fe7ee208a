"""Low-rank adapters in place of training all weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rlhf_core.config.model import Strict


class LoraConfig(Strict):
    """LoRA (Hu et al. 2021): an adapted matrix W computes ``W x + alpha / rank * B A x``; only A and B are trained.

    ``targets`` are last names of linear layers, such as ``q_proj``; none means every linear layer below the head. There
    is no drop-out: it would make PPO's trainer disagree with its sampler. ``upper_layers`` adapts only so many layers
    next to the head: no gradient passes the ones below, so that a step costs about half with a third of the layers.

    ``quantize: nf4`` holds the frozen linear layers in 4 bits (QLoRA, Dettmers et al. 2023). They stay rounded: the
    model that is saved has the weights it was trained and judged with, in its own precision again.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    targets: tuple[str, ...] = Field(default=(), strict=False)
    upper_layers: PositiveInt | None = None
    quantize: Literal["nf4"] | None = None

    def stacked_with(self, other: LoraConfig) -> LoraConfig:
        """The adapters that compute the sum of both, each with its scale in its own ``B``."""
        rank = self.rank + other.rank
        both = self.upper_layers is not None and other.upper_layers is not None
        return LoraConfig(
            rank=rank,
            alpha=rank,
            targets=tuple(sorted({*self.targets, *other.targets})) if self.targets and other.targets else (),
            upper_layers=max(self.upper_layers or 0, other.upper_layers or 0) if both else None,
            quantize=self.quantize,
        )

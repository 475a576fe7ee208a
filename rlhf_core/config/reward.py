"""Reward model, referee and judge (algorithms.md §2)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rlhf_core.config.model import (
    CheckpointConfig,
    EpochLimit,
    LoraConfig,
    OptimizerConfig,
    StageConfig,
    Strict,
)

# Held-out pairs that a training on pairs is measured on while it runs.
CURVE_PAIRS = 512


def _leave_room(shares: dict[str, float]) -> dict[str, float]:
    for name, share in shares.items():
        if not 0 < share < 1:
            raise ValueError(f"the share of {name} is {share:g}; it must be above 0 and below 1")
    if sum(shares.values()) >= 1:
        raise ValueError(
            f"the shares add up to {sum(shares.values()):g}, which leaves nothing to other categories"
        )
    return shares


# By category its share of the rows; rows of all other categories fill the rest, each once in an
# epoch.
CategoryShares = Annotated[dict[str, float], AfterValidator(_leave_room)]


class PairBatchConfig(Strict):
    """Dynamic batches (paper, section 4.2): as many pairs as fit ``token_budget``, within bounds.

    Attributes:
        token_budget: Positions of a batch, padding included.
        min_pairs: Fewest pairs of a batch, even beyond the budget.
        max_pairs: Most pairs of a batch.
        group_prompts: Puts the pairs of a prompt into one batch as far as they fit, and computes
            what they share once.
        max_padding: Largest share of padding: rows of a batch over it are computed in micro-batches
            of similar length, of which the loss is taken together. With 1 every batch is padded as
            a whole.
    """

    token_budget: PositiveInt = 4096
    min_pairs: PositiveInt = 4
    max_pairs: PositiveInt = 128
    group_prompts: bool = False
    max_padding: float = Field(default=0.1, gt=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> PairBatchConfig:
        if self.min_pairs > self.max_pairs:
            raise ValueError(f"min_pairs {self.min_pairs} is above max_pairs {self.max_pairs}")
        return self


class RewardConfig(StageConfig, EpochLimit):
    """A reward model, trained on preference pairs.

    Attributes:
        init: Starts as the SFT model, or as the base model.
        layers: Keeps only so many decoder layers, from the embedding up; null: all.
        pooling: What the head reads of a reply: its `last` token (paper, section 3.1), the `mean`
            of all, or their `sum`, by which each token has a score of its own.
        linear_probe: Fits the head to frozen features first, with this L2 penalty; then `steps` may
            be 0.
        steps: Optimiser steps.
        max_epochs: At most so many passes over the pairs: of few, fewer steps are taken; null: no
            limit.
        batch: The batches of pairs.
        max_tokens: Longest prompt and reply together; pairs with a longer one are dropped and
            counted, never cut.
        imitation: Weight of the language-modelling loss on the preferred reply.
        centering: Weight of `mean((r_w + r_l)^2)`, which gives scores an origin.
        use_margin: Asks for a difference of at least a pair's own margin, where it has one.
        length_balance: `sampling` trains on pairs among which the preferred reply is as often the
            shorter as the longer one; `product_of_experts` on all pairs, beside an expert for
            lengths that is dropped in the end.
        category_shares: By category its share of an epoch's pairs, whatever number of them there
            is. Each is then balanced by length, or has a length expert, of its own.
        lora: Trains adapters and the head instead of all weights.
        eval_every: Steps between measurements on the validation pairs.
        optimizer: Its optimiser.
        checkpoint: Its checkpoints, in steps.
    """

    init: Literal["sft", "base"] = "sft"
    layers: PositiveInt | None = None
    pooling: Literal["last", "mean", "sum"] = "last"
    linear_probe: PositiveFloat | None = None
    steps: NonNegativeInt = 300
    batch: PairBatchConfig = PairBatchConfig()
    max_tokens: PositiveInt = 256
    imitation: float = Field(default=1.0, ge=0)
    centering: float = Field(default=0.0, ge=0)
    use_margin: bool = False
    length_balance: Literal["none", "sampling", "product_of_experts"] = "none"
    category_shares: CategoryShares = {}
    lora: LoraConfig | None = None
    eval_every: PositiveInt = 100
    optimizer: OptimizerConfig = OptimizerConfig(warmup=0.1)
    checkpoint: CheckpointConfig = CheckpointConfig(every=100)

    @model_validator(mode="after")
    def _consistent(self) -> RewardConfig:
        if self.layers is not None and self.imitation > 0:
            raise ValueError(
                "imitation needs the language model's own last layer; set it to 0.0, or layers to null"
            )
        adapted = (self.lora.upper_layers or 0) if self.lora is not None else 0
        if self.layers is not None and adapted > self.layers:
            raise ValueError(f"lora.upper_layers {adapted} is more than layers {self.layers}")
        if self.steps == 0 and self.linear_probe is None:
            raise ValueError(
                "steps is 0 and linear_probe is not set, so that nothing would be trained; set one of them"
            )
        return self


class RefereeConfig(RewardConfig):
    """The second reward model, on disjoint data: it selects the policy, which never trains on it."""


class JudgeConfig(RewardConfig):
    """The third reward model, on disjoint data: it judges the result, and selects nothing."""

"""What a row must satisfy to enter training, and how rows are split."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from rlhf_core.config.model import StageConfig, Strict


class SplitConfig(Strict):
    """Shares of prompt groups; a group never spans two splits, in any dataset.

    ``judge`` is the share of training and validation groups whose pairs only the judge sees, ``referee`` the share of
    the others whose pairs only the referee sees; what remains is the reward model's.
    """

    validation: float = Field(default=0.1, gt=0, lt=0.5)
    test: float = Field(default=0.2, gt=0, lt=0.5)
    judge: float = Field(default=0.2, gt=0, lt=1)
    referee: float = Field(default=0.5, gt=0, lt=1)


class ValidateConfig(StageConfig):
    """Limits are in characters. ``max_quarantined`` is the share of refused rows above which the stage stops."""

    split: SplitConfig = SplitConfig()
    min_rows: PositiveInt = 50
    max_prompt_chars: PositiveInt = 4000
    max_reply_chars: PositiveInt = 8000
    max_turns: PositiveInt = 32
    max_quarantined: float = Field(default=0.2, ge=0, le=1)
    secrets: bool = True

"""PPO-ptx: which texts the policy is trained on beside its replies, and how many."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from rlhf_core.config.category_shares import CategoryShares
from rlhf_core.config.model import Strict


class PtxConfig(Strict):
    """PPO-ptx: cross-entropy on ``batch_size`` pretraining or demonstration texts in every policy update.

    Texts may be far longer than replies: ``micro_batch_size`` bounds those of one pass (null: as PPO's own) and never
    changes a gradient. With ``data: both`` demonstrations and pretraining texts, if there are any, are drawn alike, so
    each set has a share by its size. ``category_shares`` gives categories of one set a share of the texts, whatever
    number of them there is; see :mod:`rlhf_core.data.batches.category_shares`.
    """

    weight: NonNegativeFloat = 0.1
    batch_size: PositiveInt = 16
    micro_batch_size: PositiveInt | None = None
    data: Literal["demonstrations", "pretrain", "both"] = "demonstrations"
    category_shares: CategoryShares = {}

    @model_validator(mode="after")
    def _shares_of_texts(self) -> PtxConfig:
        if self.category_shares and self.weight == 0:
            raise ValueError("category_shares mixes the ptx texts, but weight is 0; set it, or take the shares out")
        if self.category_shares and self.data == "both":
            raise ValueError("category_shares mixes the texts of one set, but data is both; name one, or take them out")
        return self

"""Referee: a second reward model on disjoint pairs. It selects checkpoints; no reward source uses it."""

from __future__ import annotations

from rlhf_core.config.reward import RefereeConfig
from rlhf_core.data.schema import PairUser
from rlhf_core.stages.reward import reward_stage

STAGE = reward_stage("referee", RefereeConfig, PairUser.REFEREE)

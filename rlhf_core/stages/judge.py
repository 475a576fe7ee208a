"""Judge: a third reward model on disjoint pairs. It judges what is done; nothing is trained or selected by it."""

from __future__ import annotations

from rlhf_core.config.reward import JudgeConfig
from rlhf_core.data.schema import PairUser
from rlhf_core.stages.reward import reward_stage

STAGE = reward_stage("judge", JudgeConfig, PairUser.JUDGE)

"""Referee: a second reward model on disjoint pairs. It selects checkpoints; no reward source uses it."""

from __future__ import annotations

from functools import partial

from rlhf_core.config.reward import RefereeConfig
from rlhf_core.data.splits import PairUser
from rlhf_core.stages.reward import run_reward_stage
from rlhf_core.stages.runtime.contract import Stage

STAGE = Stage(
    name="referee",
    section="referee",
    config=RefereeConfig,
    run=partial(run_reward_stage, name="referee", pairs=PairUser.REFEREE),
    inputs={"clean": "data/clean", "sft": "models/sft", "base": "models/base", "pass_": "gates/sft.pass"},
    outputs={
        "model": "models/referee",
        "metrics": "metrics/referee.json",
        "history": "history/referee.jsonl",
        "scores": "samples/referee_scores.json",
    },
)

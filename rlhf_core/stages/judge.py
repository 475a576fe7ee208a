"""Judge: a third reward model on disjoint pairs. It judges what is done; nothing is trained or selected by it."""

from __future__ import annotations

from functools import partial

from rlhf_core.config.reward import JudgeConfig
from rlhf_core.data.splits import PairUser
from rlhf_core.stages.reward import run_reward_stage
from rlhf_core.stages.runtime.contract import Stage

STAGE = Stage(
    name="judge",
    section="judge",
    config=JudgeConfig,
    run=partial(run_reward_stage, name="judge", pairs=PairUser.JUDGE),
    inputs={"clean": "data/clean", "sft": "models/sft", "base": "models/base", "pass_": "gates/sft.pass"},
    outputs={
        "model": "models/judge",
        "metrics": "metrics/judge.json",
        "history": "history/judge.jsonl",
        "scores": "samples/judge_scores.json",
    },
)

"""A short recipe for the public functions, and a reward that is a Python function."""

from __future__ import annotations

from typing import Any

from unit.training.tiny import text

import rlhf_core as rlhf
from rlhf_core.config.model import CheckpointConfig
from rlhf_core.config.ppo import SelectionConfig

RATE = rlhf.OptimizerConfig(lr=1e-3, schedule="constant", warmup=0.0)
PPO: dict[str, Any] = {
    "iterations": 3,
    "warmup_iterations": 1,
    "batch_size": 4,
    "max_new_tokens": 6,
    "policy_optimizer": RATE,
    "critic_optimizer": RATE,
    "ptx": rlhf.PtxConfig(weight=0.0),
    "selection": SelectionConfig(every=1),
    "checkpoint": CheckpointConfig(every=1),
    "health": rlhf.HealthConfig(mode="report"),
}
CRITIC_FREE = {"advantage": {"estimator": "rloo"}, "replies_per_prompt": 2, "critic_optimizer": None}
QUESTIONS = [text(i, 3) for i in range(12)]


def by_length(prompts: list[list[dict[str, str]]], replies: list[str]) -> list[float]:
    """A reward for tests: the number of characters."""
    assert all(prompt[-1]["content"] in QUESTIONS for prompt in prompts)
    return [float(len(reply)) for reply in replies]

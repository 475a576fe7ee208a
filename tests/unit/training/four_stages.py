"""The four training stages on the tiny workspace, and what each of them leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unit.training.tiny import run_stage, stage_paths, without_clock

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.stages import ppo
from rlhf_core.storage.files import sha256_tree
from rlhf_core.training.run_context import RunContext

PPO = PpoConfig.model_validate(
    {
        "iterations": 2, "batch_size": 4, "max_new_tokens": 4, "warmup_iterations": 1, "ptx": {"weight": 0},
        "selection": {"every": 1, "prompts": 4, "method": "last"}, "checkpoint": {"every": 1, "keep": 1},
        "health": {"mode": "report"}, "referee_every": 2, "advantage": {"estimator": "rloo"}, "replies_per_prompt": 2,
    }
)  # fmt: skip
OUTPUTS = {
    "sft": "models/sft",
    "reward": "models/reward",
    "critic": "models/critic",
    "ppo": "models/policy",
}
CLOCK = ("tokens_per_second", "seconds", "train_seconds")


def train(name: str, root: Path, out: Path) -> dict[str, Any]:
    """Run a training stage, its outputs and its partial state under ``out``."""
    if name != "ppo":
        return run_stage(name, root, str(out))
    critic = out / "models/critic"
    critic.mkdir(parents=True, exist_ok=True)
    paths = stage_paths(ppo.STAGE, root, out, referee=root / "models/reward", critic=critic)
    return dict(ppo.run(PPO, *paths, RunContext(out / "work")))


def results(name: str, out: Path, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage leaves, without its clocks."""
    timeless = {key: value for key, value in metrics.items() if not key.startswith(CLOCK)}
    timeless.pop("last", None)  # the last row of the history
    rows = without_clock(out / f"history/{name}.jsonl")
    return {"metrics": timeless, "history": rows, "model": sha256_tree(out / OUTPUTS[name])}

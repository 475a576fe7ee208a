"""Stage critic: a value function in PPO's units, from the reward model or SFT.

With ``ppo.critic_mode: shared`` PPO takes only the value head from the critic's folder. With a
critic-free ``ppo.advantage.estimator``, or a ``policy.method`` other than PPO, the stage trains
nothing: DVC's stages have no conditions, so it says so in its outputs.
"""

from __future__ import annotations

import logging
from typing import Any

from rlhf_core.api.critic import train_critic
from rlhf_core.config.policy import CriticStageConfig
from rlhf_core.fingerprint.tracked_files import REWARD_SOURCES_FILE
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.stages.ppo import read_training_prompts
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import (
    atomic_dir,
    atomic_write_json,
    atomic_write_lines,
    atomic_write_text,
)
from rlhf_core.training.run_context import RunContext

logger = logging.getLogger(__name__)


def run(
    config: CriticStageConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, Any]:
    """Regress values on the returns of SFT's rollouts until they explain enough of them."""
    if config.no_critic_because:
        return train_nothing(config, outputs)
    tokenizer = load_tokenizer(inputs.sft)
    trained = train_critic(
        inputs.sft,
        tokenizer,
        read_training_prompts(inputs.clean, tokenizer, context.tokens),
        inputs.get("reward"),
        rollout=config.ppo.rollout,
        init=inputs.get("reward") if config.init == "reward" else None,
        config=config,
        context=context,
        allow_high_learning_rates=True,  # params.yaml was checked as a whole
    )
    trained.save(outputs.model)
    atomic_write_lines(outputs.history, trained.history)
    return trained.metrics


STAGE = Stage(
    name="critic",
    config=CriticStageConfig,
    beside=("ppo", "policy"),
    run=run,
    inputs={
        "clean": "data/clean",
        "sft": "models/sft",
        "reward": "models/reward",
        "pass_": "gates/reward.pass",
        "reward_sources": REWARD_SOURCES_FILE,
    },
    outputs={
        "model": "models/critic",
        "metrics": "metrics/critic.json",
        "history": "history/critic.jsonl",
    },
    optional_inputs=frozenset({"reward_sources"}),
)


def train_nothing(config: CriticStageConfig, outputs: Paths) -> dict[str, Any]:
    """Write outputs that hold the reason instead of a critic, and no model is loaded."""
    reason = f"no critic is trained: {config.no_critic_because} needs none"
    logger.warning(reason)
    with atomic_dir(outputs.model) as folder:
        atomic_write_json(folder / "not_trained.json", {"reason": reason})
    atomic_write_text(outputs.history, "")
    return {"rollouts": 0, "reason": reason}

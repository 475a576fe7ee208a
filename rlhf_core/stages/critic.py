"""Critic pre-training: from the reward model (or SFT with a random head) to a value function in PPO's units.

With ``ppo.critic_mode: shared`` PPO takes only the value head from the critic's folder. With a critic-free
``ppo.advantage.estimator``, or a ``policy.method`` other than PPO, the stage trains nothing: DVC's stages have no
conditions, so it says so in its outputs.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

import torch

from rlhf_core.config.stages.critic import CriticStageConfig
from rlhf_core.models.adapters.lora import merge_adapters
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.models.shared_base import SETTINGS, TENSORS, adapters_of
from rlhf_core.models.starting.base import load_policy
from rlhf_core.ppo.critic_pretraining import CriticTrainer
from rlhf_core.ppo.learners.actor_critic_pair import SeparateActorCritic
from rlhf_core.ppo.reward_sources import tracked_files
from rlhf_core.ppo.reward_sources.build import SourceContext, build_reward_fn
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages.policy.training_prompts import read_training_prompts
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_dir, atomic_write_json, atomic_write_text
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext

logger = logging.getLogger(__name__)


def run(config: CriticStageConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Roll out the frozen SFT policy and regress values on returns until explained variance holds."""
    if config.no_critic_because:
        return train_nothing(config, outputs)
    seed_everything(config.seed)
    rollout = config.ppo.rollout
    policy, tokenizer = load_policy(inputs.sft)
    policy.requires_grad_(False)
    critic = initial_critic(config, inputs)
    prompts = read_training_prompts(inputs.clean, tokenizer, policy, rollout.max_new_tokens, context.tokens)
    frozen = FrozenModels(context.launch)
    sources = SourceContext(
        inputs.reward,
        inputs.clean,
        tokenizer,
        prompts,
        rollout.micro_batch_size,
        policy.device,
        frozen,
        rollout.micro_batch_tokens,
    )
    reward_fn = build_reward_fn(rollout.reward.sources, sources)
    steps = max(config.max_rollouts, 1) * config.epochs * config.minibatches
    engine = build_engine(critic, config.optimizer, steps, "critic", context)
    trainer = CriticTrainer(
        config=config,
        rollout=rollout,
        pair=SeparateActorCritic(
            policy,
            critic,
            {"critic": engine},
            Sampling.for_rollouts(tokenizer, rollout),
            rollout.micro_batch_size,
            context.launch.logits_bytes,
            rollout.micro_batch_tokens,
        ),
        reward_fn=reward_fn,
        prompts=prompts,
        context=context,
        frozen=frozen,
    )
    metrics = trainer.run()
    critic = finish(engine, critic)
    files: dict[str, Any] = {"reward_moments.json": trainer.moments.to_dict()}
    tensors = {}
    if config.lora is not None:
        adapters = adapters_of(critic, config.lora, inputs[config.init])
        files[SETTINGS], tensors[TENSORS] = adapters.settings(), adapters.tensors
        merge_adapters(critic)
    critic.save(outputs.model, tokenizer, files, tensors)
    shutil.copyfile(trainer.history.path, outputs.history)
    return metrics


STAGE = Stage(
    name="critic",
    section="critic",
    config=CriticStageConfig,
    run=run,
    inputs={
        "clean": "data/clean",
        "sft": "models/sft",
        "reward": "models/reward",
        "pass_": "gates/reward.pass",
        "reward_sources": tracked_files.FILE,
    },
    outputs={"model": "models/critic", "metrics": "metrics/critic.json", "history": "history/critic.jsonl"},
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


def initial_critic(config: CriticStageConfig, inputs: Paths) -> ScalarModel:
    """The critic before pre-training, without the unembedding that a reward model keeps.

    With a shared backbone it is the SFT model with a head of zeros, and only the head can be trained.
    """
    shared = config.ppo.critic_mode == "shared"
    if config.init == "reward" and not shared:
        critic = ScalarModel.load(inputs.reward)
    else:
        critic = ScalarModel.from_causal_lm(inputs.sft, derive_seed(config.seed, "critic", "head"))
    critic.unembedding = None
    if shared:
        # PPO's policy will be this backbone, so that it must stay what SFT made of it. The head starts at zero: a
        # random one explains less than nothing, and no backbone adapts to it.
        critic.requires_grad_(False)
        head = critic.model.get_submodule("score").requires_grad_(True)
        torch.nn.init.zeros_(head.get_parameter("weight"))
    if config.lora is not None:
        critic.add_adapters(config.lora, derive_seed(config.seed, "critic", "lora"))
    return critic

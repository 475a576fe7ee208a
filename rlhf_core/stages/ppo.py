"""PPO: from SFT, reward model and pre-trained critic to the policy that the referee chose under limits."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.api.selection import CheckpointSelector
from rlhf_core.config.loading.rule_changes import rules_for
from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.data.chat.encoding import decode_reply
from rlhf_core.errors import TrainingPaused
from rlhf_core.evaluation.selection import CheckpointChoice
from rlhf_core.models.adapters.lora import merge_adapters
from rlhf_core.models.io import load_weights
from rlhf_core.models.starting.base import save_policy
from rlhf_core.ppo.callbacks.health import HealthCallback
from rlhf_core.ppo.callbacks.health_monitor import HealthMonitor
from rlhf_core.ppo.callbacks.selection import SelectionCallback
from rlhf_core.ppo.checkpoints.run_checkpoint import load_best, nonfinite_as_none
from rlhf_core.ppo.reward_sources import tracked_files
from rlhf_core.ppo.reward_sources.build import SourceContext, build_reward_fn
from rlhf_core.ppo.rewards.token_rewards import reward_model_fn
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner
from rlhf_core.runtime import distributed
from rlhf_core.sampling.factory import opened_sampler
from rlhf_core.stages.policy.outputs import POLICY_OUTPUTS
from rlhf_core.stages.policy.ppo_models import PolicyModels, build_pair, initial_moments, ptx_data
from rlhf_core.stages.policy.ppo_selection import make_selector
from rlhf_core.stages.policy.training_prompts import read_training_prompts
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines
from rlhf_core.training.rng import seed_everything
from rlhf_core.training.run_context import RunContext


@dataclass(frozen=True)
class PpoRun:
    """A run ready to start: the trainer, and those of its parts that the stage reads afterwards."""

    trainer: Trainer
    selector: CheckpointSelector
    health: HealthCallback
    tokenizer: PreTrainedTokenizerBase


def run(config: PpoConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Train, choose a checkpoint, save it, and describe the run."""
    ppo = assemble(config, inputs, context)
    try:
        with opened_sampler(config.sampler, context.work) as sampler:
            ppo.trainer.sampler = sampler
            ppo.trainer.run()
        choice = ppo.selector.choice()
        require_admissible(choice, config)
    except TrainingPaused:
        publish_lines(ppo.trainer, outputs)  # the report of a paused run shows its curves
        raise
    policy = ppo.trainer.learner.pair.release_policy()
    load_weights(policy, load_best(context.work / "best", choice.candidate.iteration))
    if config.policy_lora is not None:
        merge_adapters(policy)
    save_policy(outputs.model, policy, ppo.tokenizer)
    publish_lines(ppo.trainer, outputs)
    context.tracker.log_artifact(outputs.samples, "samples")
    context.tracker.set_tags({"rlhf.selection": choice.reason})
    metrics = summary(ppo.trainer, ppo.health, choice)
    atomic_write_json(outputs.metrics, metrics)
    return metrics


STAGE = Stage(
    name="ppo",
    section="ppo",
    config=PpoConfig,
    run=run,
    inputs={
        "clean": "data/clean",
        "base": "models/base",
        "sft": "models/sft",
        "reward": "models/reward",
        "referee": "models/referee",
        "critic": "models/critic",
        "pass_": "gates/reward.pass",
        "reward_sources": tracked_files.FILE,
    },
    outputs=POLICY_OUTPUTS,
    optional_inputs=frozenset({"reward_sources"}),
)


def assemble(config: PpoConfig, inputs: Paths, context: RunContext) -> PpoRun:
    """Build a run from the inputs of the stage; ``context.work`` keeps its partial state."""
    seed_everything(config.seed)
    models = PolicyModels.load(config, inputs, context)
    tokenizer, frozen = models.tokenizer, models.frozen
    selector = make_selector(config, inputs, models.reference, tokenizer, frozen)
    policy = models.load_trained(config, inputs)
    selector.evaluate.reference = models.reference

    prompts = read_training_prompts(inputs.clean, tokenizer, policy, config.max_new_tokens, context.tokens)
    size, budget = config.micro_batch_size, config.micro_batch_tokens
    sources = SourceContext(inputs.reward, inputs.clean, tokenizer, prompts, size, policy.device, frozen, budget)
    reward_fn = build_reward_fn(config.reward.sources, sources)
    pair = build_pair(config, inputs, models, policy, context)
    positions = getattr(policy.config, "max_position_embeddings", None)
    ptx = ptx_data(config, inputs.clean, tokenizer, positions, context.tokens)
    learner = Learner(config, pair, models.reference, ptx)

    limits = {"kl": config.selection.max_kl, "max_new_tokens": float(config.max_new_tokens)}
    health = HealthCallback(HealthMonitor(limits, rules_for(config)), config.health)
    trainer = Trainer(
        learner=learner,
        reward_fn=reward_fn,
        prompts=prompts,
        decode=lambda ids: decode_reply(tokenizer, ids)[0],
        moments=initial_moments(config, inputs),
        context=context,
        callbacks=(SelectionCallback(selector, config.selection.every, context.work / "best"), health),
        referee=reward_model_fn(frozen.scalar(inputs.referee), size, budget),
        frozen=frozen,
    )
    return PpoRun(trainer, selector, health, tokenizer)


def publish_lines(trainer: Trainer, outputs: Paths) -> None:
    """Copy history and samples from the partial state to the outputs.

    What rollbacks abandoned comes along, marked with the number of its ``rollback``: rows in a file of their own, so
    that curves stay right, and samples after the others. Only the first rank's files are whole.
    """
    if not distributed.is_rank_zero():
        return
    journal = trainer.checkpoints.journal
    shutil.copyfile(trainer.history.path, outputs.history)
    atomic_write_lines(outputs.abandoned, journal.abandoned("rows"))
    atomic_write_lines(outputs.samples, [*trainer.samples.rows(), *journal.abandoned("samples")])


def require_admissible(choice: CheckpointChoice, config: PpoConfig) -> None:
    """Check that a checkpoint keeps the limits; with health mode ``report`` the choice stands, marked.

    Raises:
        TrainingPaused: No checkpoint keeps all limits.
    """
    if config.selection.method == "referee" and not choice.admissible and config.health.mode == "enforce":
        raise TrainingPaused(
            f"ppo produced no admissible policy: {choice.reason}. Raise ppo.kl.coefficient or lower "
            "ppo.policy_optimizer.lr; or, to take it all the same, loosen ppo.selection or set its method to last"
        )


def summary(trainer: Trainer, health: HealthCallback, choice: CheckpointChoice) -> dict[str, Any]:
    """``metrics/ppo.json``: the selected checkpoint, the last iteration, health findings, each rollback."""
    rows, journal = trainer.history.rows(), trainer.checkpoints.journal
    last = {name: value for name, value in rows[-1].items() if isinstance(value, int | float)}
    selected = {name: value for name, value in choice.as_dict().items() if isinstance(value, int | float)}
    rollbacks = {f"rollback_{n}": entry.record() for n, entry in enumerate(journal.entries, start=1)}
    return rollbacks | {
        "iterations": trainer.done,
        "selected_iteration": choice.candidate.iteration,
        "admissible": int(choice.admissible),
        "skipped_steps": sum(row["skipped_steps"] for row in rows),
        "findings": len(health.findings),
        "pauses": sum(finding["action"] == "pause" for finding in health.findings),
        "rollbacks": len(journal),
        "reward_gain": last["reward_mean"] - rows[0]["reward_mean"],
        "selected": nonfinite_as_none({k: v for k, v in selected.items() if not isinstance(v, bool)}),
        "last": last,
    }

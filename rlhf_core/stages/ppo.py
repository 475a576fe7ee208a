"""PPO: from SFT, reward model and pre-trained critic to the policy that the referee chose under limits."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core import distributed
from rlhf_core.config.health.rule_changes import rules_for
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.chat import decode_reply, encode_dialogue, encode_reply, pad_id
from rlhf_core.data.schema import Demonstration, PretrainText, read_rows
from rlhf_core.errors import TrainingPaused
from rlhf_core.evaluation.selection import CheckpointChoice
from rlhf_core.files import atomic_write_json, atomic_write_lines, read_json
from rlhf_core.models.actor_critic import ActorCritic
from rlhf_core.models.base import load_policy, save_policy
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.lora import WithoutAdapters, add_adapters, merge_adapters
from rlhf_core.models.nf4 import pack_linear_layers
from rlhf_core.models.shared_base import SETTINGS, SharedBase
from rlhf_core.ppo.health_monitor import Monitor
from rlhf_core.ppo.ptx import PtxData
from rlhf_core.ppo.reward_sources import tracked_files
from rlhf_core.ppo.reward_sources.building import Setting, build_scorer
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import Actors, model_scorer
from rlhf_core.ppo.run_checkpoint import finite, load_best
from rlhf_core.ppo.setup import read_prompts, require_room, sampling_for
from rlhf_core.ppo.trainer import Prompts, Trainer
from rlhf_core.ppo.update import Learner
from rlhf_core.stages.ppo_selection import CheckpointSelector, make_selector
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext


def run(config: PpoConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Train, choose a checkpoint, save it, and describe the run."""
    trainer, selector, tokenizer = assemble(config, inputs, context)
    try:
        trainer.run()
        choice = selector.choice()
        require_admissible(choice, config)
    except TrainingPaused:
        publish_lines(trainer, outputs)  # the report of a paused run shows its curves
        raise
    policy = trained_policy(trainer.learner)
    load_weights(policy, load_best(context.work / "best", choice.candidate.iteration))
    if config.policy_lora is not None:
        merge_adapters(policy)
    save_policy(outputs.model, policy, tokenizer)
    publish_lines(trainer, outputs)
    context.tracker.log_artifact(outputs.samples, "samples")
    context.tracker.set_tags({"rlhf.selection": choice.reason})
    metrics = summary(trainer, choice)
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
    outputs={
        "model": "models/policy",
        "metrics": "metrics/ppo.json",
        "history": "history/ppo.jsonl",
        "abandoned": "history/ppo_abandoned.jsonl",
        "samples": "samples/ppo.jsonl",
    },
    optional_inputs=frozenset({"reward_sources"}),
)


def assemble(
    config: PpoConfig, inputs: Paths, context: RunContext
) -> tuple[Trainer, CheckpointSelector, PreTrainedTokenizerBase]:
    """A run ready to go, from the inputs of the stage; ``context.work`` keeps its partial state."""
    seed_everything(config.seed)
    frozen = FrozenModels(context.launch)
    reference, tokenizer = load_reference(config, inputs, frozen)
    selector = make_selector(config, inputs, reference, tokenizer, frozen)
    if config.policy_lora is None:
        reference = selector.evaluate.reference = frozen.place(reference)
    # Not before the reference is placed: the device may have no room for both as they are loaded.
    policy = load_trained(config, inputs, reference)
    trainer = make_trainer(config, inputs, context, policy, reference, tokenizer, selector, frozen)
    return trainer, selector, tokenizer


def load_reference(
    config: PpoConfig, inputs: Paths, frozen: FrozenModels
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Reference and tokenizer. With adapters it is the policy with its adapters switched off, and its weights may
    serve ``frozen`` models too."""
    model, tokenizer = load_policy(inputs.sft)
    if config.policy_lora is None:
        return model.requires_grad_(False), tokenizer
    if config.share_base:
        model.requires_grad_(False)
        if config.policy_lora.quantize is not None:
            pack_linear_layers(model)
        frozen.base = SharedBase(model, inputs.sft)
    add_adapters(model, config.policy_lora, derive_seed(config.seed, "ppo", "lora"))
    without: Any = WithoutAdapters(model)
    return without, tokenizer


def load_trained(config: PpoConfig, inputs: Paths, reference: PreTrainedModel) -> PreTrainedModel:
    """The policy: a model of its own, or the one that is the reference without its adapters."""
    if isinstance(reference, WithoutAdapters):
        return reference.model
    return load_policy(inputs.sft if config.policy_init == "sft" else inputs.base)[0]


def trained_policy(learner: Learner) -> PreTrainedModel:
    """The policy, whole, on the first rank, which goes on alone. A value head on it has done its work."""
    if isinstance(learner.critic, ActorCritic):
        return finish(learner.policy_engine, learner.critic).policy
    return finish(learner.policy_engine, learner.policy)


def publish_lines(trainer: Trainer, outputs: Paths) -> None:
    """Copy history and samples from the partial state to their places.

    What rollbacks abandoned comes along, marked with the number of its ``rollback``: rows in a file of their own, so
    that curves stay right, and samples after the others. Of several ranks the first alone has whole files.
    """
    if not distributed.is_rank_zero():
        return
    shutil.copyfile(trainer.history.path, outputs.history)
    atomic_write_lines(outputs.abandoned, trainer.journal.abandoned("rows"))
    atomic_write_lines(outputs.samples, [*trainer.samples.rows(), *trainer.journal.abandoned("samples")])


def make_trainer(
    config: PpoConfig,
    inputs: Paths,
    context: RunContext,
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    selector: CheckpointSelector,
    frozen: FrozenModels,
) -> Trainer:
    """All parts of one run, loaded and connected."""
    units = config.units
    rows, prompt_ids = read_prompts(inputs.clean / "prompts" / "train.parquet", tokenizer)
    positions = getattr(policy.config, "max_position_embeddings", None)
    require_room(prompt_ids, units.max_new_tokens, positions)
    setting = Setting(
        inputs.reward, inputs.clean, tokenizer, rows, prompt_ids, units.micro_batch_size, policy.device, frozen
    )
    score = build_scorer(units.reward.sources, setting)
    critic = load_critic(config, inputs, policy, frozen)
    learner = make_learner(config, inputs, context, policy, critic, reference, tokenizer)
    referee = frozen.scalar(inputs.referee)
    return Trainer(
        learner=learner,
        actors=Actors(policy, reference, critic, score),
        prompts=Prompts(prompt_ids, [row.prompt[-1].content for row in rows], lambda ids: decode(tokenizer, ids)),
        moments=RunningMeanStd.from_dict(read_json(inputs.critic / "reward_moments.json")),
        monitor=Monitor({"kl": config.selection.max_kl, "max_new_tokens": config.max_new_tokens}, rules_for(config)),
        selector=selector,
        context=context,
        referee=model_scorer(referee, units.micro_batch_size),
        frozen=frozen,
    )


def load_critic(
    config: PpoConfig, inputs: Paths, policy: PreTrainedModel, frozen: FrozenModels
) -> ScalarModel | ActorCritic:
    """The pre-trained critic, or the policy with its value head where both share a backbone.

    Pre-trained as adapters, it goes on with those on the policy's frozen weights where these are shared.
    """
    adapted = (inputs.critic / SETTINGS).is_file()
    if frozen.base is not None and config.critic_mode == "separate" and adapted:
        return frozen.base.scalar(inputs.critic, through=inputs.reward)
    critic = ScalarModel.load(inputs.critic)
    if config.critic_mode == "shared":
        return ActorCritic.with_head_of(critic, policy)
    if config.critic_lora is not None:
        critic.add_adapters(config.critic_lora, derive_seed(config.seed, "ppo", "critic", "lora"))
    return critic


def make_learner(
    config: PpoConfig,
    inputs: Paths,
    context: RunContext,
    policy: PreTrainedModel,
    critic: ScalarModel | ActorCritic,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Learner:
    """Engines with their schedules, and the ptx texts."""
    per_iteration = config.epochs * config.minibatches
    steps = config.iterations * per_iteration
    warmup = config.warmup_iterations * per_iteration or None
    if isinstance(critic, ActorCritic):
        policy_engine = critic_engine = build_engine(critic, config.policy_optimizer, steps, "policy", context, warmup)
    else:
        assert config.critic_optimizer is not None
        policy_engine = build_engine(policy, config.policy_optimizer, steps, "policy", context, warmup)
        critic_engine = build_engine(critic, config.critic_optimizer, steps, "critic", context, warmup)
    return Learner(
        config=config,
        sampling=sampling_for(tokenizer, config.units),
        policy=policy,
        policy_engine=policy_engine,
        critic=critic,
        critic_engine=critic_engine,
        reference=reference,
        ptx=ptx_data(config, inputs.clean, tokenizer, getattr(policy.config, "max_position_embeddings", None)),
    )


def ptx_data(
    config: PpoConfig, clean: Path, tokenizer: PreTrainedTokenizerBase, positions: int | None
) -> PtxData | None:
    """Texts of the ptx loss; those longer than the model's positions are left out, never cut."""
    if config.ptx.weight == 0:
        return None
    if config.ptx.data == "demonstrations":
        rows = read_rows(clean / "demonstrations" / "train.parquet", Demonstration)
        pairs = [encode_dialogue(tokenizer, row.prompt, row.reply) for row in rows]
    else:
        texts = read_rows(clean / "pretrain" / "train.parquet", PretrainText)
        pairs = [([], encode_reply(tokenizer, row.text)) for row in texts]
    fitting = [pair for pair in pairs if positions is None or len(pair[0]) + len(pair[1]) <= positions]
    return PtxData(fitting, config.ptx.batch_size, derive_seed(config.seed, "ppo", "ptx"), pad_id(tokenizer))


def require_admissible(choice: CheckpointChoice, config: PpoConfig) -> None:
    """``TrainingPaused`` when no checkpoint keeps the limits; with health mode ``report`` the choice stands, marked."""
    if config.selection.method == "referee" and not choice.admissible and config.health.mode == "enforce":
        raise TrainingPaused(
            f"ppo produced no admissible policy: {choice.reason}. Raise ppo.kl.coefficient or lower "
            "ppo.policy_optimizer.lr; or, to take it all the same, loosen ppo.selection or set its method to last"
        )


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Text of a reply without its end marker."""
    return decode_reply(tokenizer, ids)[0]


def load_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Put an engine's gathered weights into the model, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def summary(trainer: Trainer, choice: CheckpointChoice) -> dict[str, Any]:
    """``metrics/ppo.json``: the selected checkpoint, the last iteration, what the monitor found, each rollback."""
    rows = trainer.history.rows()
    last = {name: value for name, value in rows[-1].items() if isinstance(value, int | float)}
    selected = {name: value for name, value in choice.as_dict().items() if isinstance(value, int | float)}
    returns = {f"rollback_{n}": entry.record() for n, entry in enumerate(trainer.journal.entries, start=1)}
    return returns | {
        "iterations": trainer.done,
        "selected_iteration": choice.candidate.iteration,
        "admissible": int(choice.admissible),
        "skipped_steps": sum(row["skipped_steps"] for row in rows),
        "findings": len(trainer.findings),
        "pauses": sum(finding["action"] == "pause" for finding in trainer.findings),
        "rollbacks": len(trainer.journal),
        "reward_gain": last["reward_mean"] - rows[0]["reward_mean"],
        "selected": finite({name: value for name, value in selected.items() if not isinstance(value, bool)}),
        "last": last,
    }

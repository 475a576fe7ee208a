"""The policy by rejection sampling instead of PPO: SFT, fine-tuned on its own best replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.inputs import reward_fn_of
from rlhf_core.config.policy import Method, PolicyStageConfig
from rlhf_core.data.batches import epoch_order
from rlhf_core.data.tokens import decode_reply, pad_id
from rlhf_core.errors import DataError
from rlhf_core.fingerprint.tracked_files import REWARD_SOURCES_FILE
from rlhf_core.models.adapters import PeftAdapter, add_adapters, merge_adapters, peft_adapter
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import load_policy, save_policy
from rlhf_core.ppo.rejection_sampling import BestReplies, RejectionSampler
from rlhf_core.ppo.rollout import TrainingPrompts, require_room
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import opened_sampler
from rlhf_core.stages.ppo import POLICY_OUTPUTS, read_training_prompts
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines
from rlhf_core.training import loop
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.examples import Example
from rlhf_core.training.loop import LoopResult
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import SftTask

NAME: Method = "rejection_sampling"
HELD_OUT_SHARE = 16  # every so many of the best replies is held out
SAMPLES = 64


def run(
    config: PolicyStageConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, Any]:
    """Sample, keep the best, fine-tune on them; write the outputs that PPO writes."""
    seed_everything(config.seed)
    settings = config.policy.rejection_sampling
    policy, tokenizer = load_policy(inputs.sft)
    prompts = read_training_prompts(inputs.clean, tokenizer, context.tokens)
    require_room(prompts.ids, config.max_new_tokens, positions_of(policy.config))
    best = sample_best(config, inputs, policy, tokenizer, prompts, context)
    examples = [
        Example(prompts.ids[row], reply)
        for row, reply in zip(best.prompts, best.replies, strict=True)
    ]
    policy, result, adapter = fine_tune_on(examples, policy, pad_id(tokenizer), config, context)
    save_policy(outputs.model, policy, tokenizer, adapter=adapter)
    sampling_cost = {"sampled_tokens": best.sampled_tokens, "seconds_sampling": best.seconds}
    first, *rest = result.history
    atomic_write_lines(outputs.history, [first | sampling_cost, *rest])
    atomic_write_lines(outputs.abandoned, [])  # PPO's: nothing is rolled back here
    atomic_write_lines(outputs.samples, sample_rows(best, prompts, tokenizer))
    context.tracker.log_artifact(outputs.samples, "samples")
    first_loss, last = result.evaluations()[0], result.evaluations()[-1]
    sampled_prompts = best.sampled_replies // settings.replies_per_prompt
    metrics = {
        "method": config.policy.method,
        "replies_per_prompt": settings.replies_per_prompt,
        "prompts_without_finished_reply": sampled_prompts - len(best.prompts),
        "unrewarded_replies": best.unrewarded_replies,
        "reward_sampled": best.sampled_rewards / (best.sampled_replies - best.unrewarded_replies),
        "reward_kept": sum(best.rewards) / len(best.rewards),
        **sampling_cost,
        "steps": settings.steps,
        "train_rows": len(examples) - len(examples[::HELD_OUT_SHARE]),
        "validation_loss_before": first_loss["validation_loss"],
        "validation_loss": last["validation_loss"],
        "train_tokens": result.tokens,
        "train_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "skipped_steps": result.skipped_steps,
    }
    atomic_write_json(outputs.metrics, metrics)
    return metrics


STAGE = Stage(
    name="ppo",
    config=PolicyStageConfig,
    beside=("policy",),
    run=run,
    inputs={
        "clean": "data/clean",
        "sft": "models/sft",
        "reward": "models/reward",
        "pass_": "gates/reward.pass",
        "reward_sources": REWARD_SOURCES_FILE,
    },
    outputs=POLICY_OUTPUTS,
    optional_inputs=frozenset({"reward_sources"}),
    method=NAME,
)


def sample_best(
    config: PolicyStageConfig,
    inputs: Paths,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: TrainingPrompts,
    context: RunContext,
) -> BestReplies:
    """Sample replies to the training prompts, and keep the best by ``ppo.reward.sources``."""
    settings, frozen = config.policy.rejection_sampling, FrozenModels(context.launch)
    order = epoch_order(len(prompts), derive_seed(config.seed, NAME, "prompts"), 0)
    with opened_sampler(config.sampler, context.work, context.folder) as sampler:
        sampler.sync(policy, 0)
        rejection_sampler = RejectionSampler(
            sampler=sampler,
            reward_fn=reward_fn_of(inputs.reward, config, prompts, tokenizer, frozen, context),
            prompts=prompts,
            sampling=Sampling.for_rollouts(tokenizer, config),
            replies_per_prompt=settings.replies_per_prompt,
            batch_size=config.sampling_batch_size,
            seed=derive_seed(config.seed, NAME, "replies"),
            frozen=frozen,
            work=context.work / "best_replies",
            preemption=context.preemption,
        )
        return rejection_sampler.best_replies(order[: settings.prompts])


def fine_tune_on(
    examples: Sequence[Example],
    policy: PreTrainedModel,
    pad: int,
    config: PolicyStageConfig,
    context: RunContext,
) -> tuple[PreTrainedModel, LoopResult, PeftAdapter | None]:
    """Train ``policy`` in place by cross-entropy on the replies, of which every 16th is held out.

    Adapters are merged.

    Raises:
        DataError: There are too few examples to hold one out.
    """
    train = [example for number, example in enumerate(examples) if number % HELD_OUT_SHARE]
    if not train:
        raise DataError(
            "only one prompt has a finished reply, which is too little to train on; add prompts"
        )
    if config.policy_lora is not None:
        add_adapters(policy, config.policy_lora, derive_seed(config.seed, NAME, "lora"))
    settings, limit = config.policy.rejection_sampling, context.launch.logits_bytes

    def task(engine: Engine) -> SftTask:
        return SftTask(
            engine, policy, train, examples[::HELD_OUT_SHARE], settings, config.seed, pad, limit
        )

    policy, result = loop.train(policy, task, settings, NAME, config.seed, context)
    if config.policy_lora is None:
        return policy, result, None
    adapter = peft_adapter(policy)
    merge_adapters(policy)
    return policy, result, adapter


def sample_rows(
    best: BestReplies, prompts: TrainingPrompts, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Return the first of the best replies with prompt and reward, for people to read."""
    samples = []
    for row, reply, reward in zip(best.prompts[:SAMPLES], best.replies, best.rewards, strict=False):
        turns = [{"role": turn.role, "content": turn.content} for turn in prompts.messages[row]]
        text, _ = decode_reply(tokenizer, reply)
        samples.append({"prompt": turns, "reply": text, "reward": reward})
    return samples

"""The models and phases of each stage, and the passes that a phase makes (stages/, training/, ppo/, evaluation/)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from rlhf_core.config.base import SftConfig
from rlhf_core.config.loading import Params
from rlhf_core.config.policy import DpoConfig, RejectionSamplingConfig
from rlhf_core.config.problems import nearest
from rlhf_core.config.reward import RewardConfig
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.perplexity import POSITIONS_PER_CHUNK, ROWS_PER_PASS
from rlhf_core.memory import passes
from rlhf_core.memory.dry_run import MemoryUse, largest, model_size
from rlhf_core.memory.estimate import (
    EstimateInputs,
    MemoryEstimate,
    ModelRole,
    StageEstimate,
    StageInputs,
    at_work,
    gathered_by_one,
    held,
    optimizer_step,
    whole,
)
from rlhf_core.memory.sequence_lengths import BatchShape
from rlhf_core.memory.sharding import parallel_layout, trained_footprint
from rlhf_core.models.forward import changes_logits
from rlhf_core.ppo.rejection_sampling import PROMPTS_AT_ONCE
from rlhf_core.sampling.distribution import EvaluationSampling, Sampling
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.training.dpo import scoring_rows
from rlhf_core.training.reward.first_fits import FEATURE_ROWS, FEATURE_TOKENS
from rlhf_core.training.reward.trainer import SCORING_ROWS, SCORING_TOKENS
from rlhf_core.training.sft import EVALUATION_ROWS

# The roles of a stage, what each of its phases needs beyond what they hold, and what their loading takes.
StageUse = tuple[Sequence[ModelRole], dict[str, MemoryUse], MemoryUse]


def sft_stage(inputs: StageInputs) -> StageUse:
    """Supervised fine-tuning: micro-batches of demonstrations, to train on and to hold out."""
    config, data = inputs.params.sft, inputs.lengths.demonstrations
    policy = (
        inputs.trained("policy", "causal_lm") if config.steps else inputs.frozen("policy", "causal_lm", on_device=True)
    )
    held_out, limit = data.batch(config.micro_batch_size or EVALUATION_ROWS), inputs.layout.logits_bytes
    evaluation = passes.reply_loss(policy.variant.in_inference, held_out, logits_bytes=limit)
    phases = {"evaluation": largest(evaluation) + at_work(policy)}
    if config.steps:
        phases |= _training(inputs, policy, config, data.batch)
    return [policy], phases, whole(policy)


def reward_stage(inputs: StageInputs, stage: Literal["reward", "referee", "judge"]) -> StageUse:
    """Reward models: token-budget batches of pairs, of which each GPU takes its share in one pass."""
    config: RewardConfig = getattr(inputs.params, stage)
    limits, lengths = config.batch, inputs.lengths.pairs
    if config.steps:
        model = inputs.trained(stage, "reward", config.lora, layers=config.layers)
    else:
        model = inputs.frozen(stage, "reward", config.layers, on_device=True)

    def reading(rows: int, tokens: int) -> MemoryUse:
        batch = BatchShape(max(1, min(rows, tokens // lengths.width)), lengths.width)
        return largest(passes.reply_scores(model.variant, batch)) + at_work(model)

    phases = {"evaluation": reading(SCORING_ROWS, SCORING_TOKENS)}
    if config.linear_probe is not None:
        phases["linear probe"] = reading(FEATURE_ROWS, FEATURE_TOKENS)
    if config.steps:
        batch, pairs = lengths.pairs(limits.token_budget, limits.min_pairs, limits.max_pairs)
        own = inputs.layout.share(pairs)
        imitated = -(-batch.scored * own // pairs) if config.imitation > 0 else 0
        update = passes.pair_loss(model.variant, BatchShape(2 * own, batch.width, imitated), inputs.layout.logits_bytes)
        phases |= {"update": model.peak_of_update(update), "step": optimizer_step(model)}
    return [model], phases, whole(model)


def critic_stage(inputs: StageInputs) -> StageUse:
    """Critic pre-training: the frozen SFT policy rolls out and is its own reference; the critic learns the returns."""
    config, scorers = inputs.params.critic, inputs.reward_models()
    policy = inputs.frozen("policy", "causal_lm", on_device=True)
    critic = inputs.trained("critic", "scalar", config.lora, layers=inputs.critic_layers)
    if inputs.params.ppo.critic_mode == "shared":
        head = replace(inputs.variant("scalar"), trained="value_head")
        critic = ModelRole("critic", head, trained_footprint(model_size(head), inputs.layout))
    rollout_memory = _rollout_tensors(inputs, config.batch_size)
    batch, accumulated = _minibatch(inputs, config.batch_size, config.minibatches)
    update = passes.value_loss(critic.variant, batch, inputs.sampling, accumulated)
    phases = _rollout_phases(inputs, config.batch_size, policy, critic, None, [critic], scorers) | {
        "update critic": critic.peak_of_update(update) + rollout_memory,
        "step": optimizer_step(critic) + rollout_memory,
    }
    return [policy, critic, *scorers], phases, whole(policy, critic, *scorers[-1:]) + held(scorers[:-1])


def ppo_stage(inputs: StageInputs) -> StageUse:
    """PPO: rollout, updates of policy and critic, and the selection of checkpoints by reward model and referee.

    With adapters on the policy the reference is the policy without them; a shared critic is the policy with a head, and
    critic-free advantages need none.
    Gradients of the policy wait while the critic's are computed, since both step together.
    """
    config = inputs.params.ppo
    policy = inputs.trained("policy", "causal_lm", config.policy_lora)
    own_critic = config.critic_mode == "separate" and not config.advantage.critic_free
    critic = inputs.ppo_critic() if own_critic else None
    trained = [policy, *([critic] if critic else [])]
    references = [inputs.frozen("reference", "causal_lm")] if config.policy_lora is None else []
    scorers = [role for role in inputs.reward_models() if role.name != "reward"]
    scorers += [inputs.frozen_scalar("reward"), inputs.frozen_scalar("referee")]
    frozen = [*references, *scorers]
    reference = references[0] if references else None
    rollout_memory = _rollout_tensors(inputs, config.batch_size)
    phases = _rollout_phases(inputs, config.batch_size, policy, critic, reference, trained, scorers)
    batch, accumulated = _minibatch(inputs, config.batch_size, config.minibatches)
    exact_kl = config.kl.placement == "loss" and config.kl.estimator == "full" and config.kl.coefficient > 0
    update = passes.reply_statistics(
        policy.variant,
        batch,
        inputs.sampling,
        entropies=config.entropy.kind != "off",
        reference="frozen" if exact_kl else "none",
        accumulated=accumulated,
        logits_bytes=inputs.layout.logits_bytes,
    )
    phases["update policy"] = policy.peak_of_update(update) + rollout_memory
    if config.ptx.weight > 0:
        rows = inputs.layout.share(config.ptx.batch_size)
        size = config.ptx.micro_batch_size or config.micro_batch_size or config.ptx.batch_size
        texts = inputs.lengths.ptx.batch(min(size, rows))
        update = passes.reply_loss(policy.variant, texts, True, inputs.layout.logits_bytes)
        phases["update ptx"] = policy.peak_of_update(update) + rollout_memory
    if critic is not None:
        waiting = MemoryUse(gradients=policy.footprint.gradients)
        update = passes.value_loss(critic.variant, batch, inputs.sampling, accumulated)
        phases["update critic"] = critic.peak_of_update(update) + waiting + rollout_memory
    phases["step"] = optimizer_step(*trained) + rollout_memory
    phases["selection"] = _selection(inputs, policy, frozen) + at_work(policy, *frozen) + rollout_memory
    # Models are loaded whole: the reference, each scorer before it is placed, SFT's replies for the selection; then the
    # reference is placed, and policy and critic follow. Where the policy is the reference, it is packed at once.
    if references:
        first, last = whole(*references), whole(*trained) + held(references)
    else:
        first = MemoryUse(weights=policy.footprint.loaded)
        last = whole(*trained[1:]) + first
    sft = inputs.frozen("sft", "causal_lm", on_device=True)
    loading = [
        whole(policy),
        first + held(scorers) + whole(scorers[-1]),
        first + held(scorers) + at_work(*scorers) + _selection(inputs, sft, scorers),
        last + held(scorers),
    ]
    return [*trained, *frozen], phases, largest(loading)


def dpo_stage(inputs: StageInputs) -> StageUse:
    """DPO: the policy alone, on both replies of each pair; as its own reference it is read once before training."""
    config, lengths = inputs.params.policy.dpo, inputs.lengths.pairs
    policy = inputs.trained("policy", "causal_lm", inputs.params.ppo.policy_lora)
    read = lengths.batch(scoring_rows(config))
    reference = passes.reply_loss(policy.variant.in_inference, read, logits_bytes=inputs.layout.logits_bytes)
    phases = {"log-probabilities": largest(reference) + at_work(policy)}
    return [policy], phases | _training(inputs, policy, config, lambda pairs: lengths.batch(2 * pairs)), whole(policy)


def rejection_sampling_stage(inputs: StageInputs) -> StageUse:
    """Rejection sampling: the policy samples, the reward sources score, and the policy is fine-tuned on the best.

    The scorers are counted throughout, although they are freed before the fine-tuning.
    """
    config = inputs.params.policy.rejection_sampling
    policy, scorers = inputs.trained("policy", "causal_lm", inputs.params.ppo.policy_lora), inputs.reward_models()
    sampled = PROMPTS_AT_ONCE * config.replies_per_prompt
    phases = _rollout_phases(inputs, sampled, policy, None, None, [policy], scorers)
    del phases["scoring"]  # no log-probabilities are needed
    phases |= _training(inputs, policy, config, inputs.rollout_batch)
    return [policy, *scorers], phases, whole(policy, *scorers[-1:]) + held(scorers[:-1])


def policy_stage(inputs: StageInputs) -> StageUse:
    """The stage ``ppo`` by the method that trains the policy."""
    by_method = {"ppo": ppo_stage, "dpo": dpo_stage, "rejection_sampling": rejection_sampling_stage}
    return by_method[inputs.params.policy.method](inputs)


def evaluate_stage(inputs: StageInputs) -> StageUse:
    """The evaluation: SFT, policy and judges are in memory one after the other.

    Replies are sampled with the evaluation's filters and without; the latter are scored under SFT. Both models read
    held-out text.
    """
    config, prompt = inputs.params.evaluate, inputs.lengths.prompt
    model = inputs.frozen("model", "causal_lm", on_device=True)
    judge = inputs.frozen("judge", "scalar", inputs.params.judge.layers, on_device=True)
    rows, unfiltered_rows = min(config.batch_size, config.prompts), min(config.batch_size, config.kl_samples)
    unfiltered = Sampling(-1, 0, config.max_new_tokens, forbidden_ids=(0,))
    judged_base = replace(unfiltered, max_new_tokens=config.sampling.max_new_tokens)
    judged_sampling = EvaluationSampling(judged_base, config.sampling.top_p, config.sampling.repetition_penalty)
    drift = BatchShape(unfiltered_rows, prompt + config.max_new_tokens)
    judged = BatchShape(rows, prompt + config.sampling.max_new_tokens)
    filtered = passes.generation(model.variant, rows, prompt, judged_sampling)
    generation = [*filtered, *passes.generation(model.variant, unfiltered_rows, prompt, unfiltered)]
    width = min(config.perplexity.max_tokens, inputs.lengths.pairs.width)
    text = BatchShape(ROWS_PER_PASS, width, min(ROWS_PER_PASS * width, POSITIONS_PER_CHUNK))
    if config.sampler.kind != "local":
        generation = []
    phases = {
        "generation": largest(generation) + whole(model),
        "perplexity": largest(passes.reply_loss(model.variant, text)) + whole(model),
        "drift": largest(passes.reply_statistics(model.variant, drift, unfiltered)) + whole(model),
        "judging": largest(passes.reply_scores(judge.variant, judged)) + whole(judge),
    }
    return [], phases, whole(model)


STAGES: dict[str, Callable[[StageInputs], StageUse]] = {
    "sft": sft_stage,
    "reward": partial(reward_stage, stage="reward"),
    "referee": partial(reward_stage, stage="referee"),
    "judge": partial(reward_stage, stage="judge"),
    "critic": critic_stage,
    "ppo": policy_stage,
    "evaluate": evaluate_stage,
}


def planned_stages(params: Params) -> tuple[str, ...]:
    """The stages that run a model: critic pre-training only where PPO's advantages need a critic."""
    with_critic = params.policy.method == "ppo" and not params.ppo.advantage.critic_free
    return tuple(name for name in STAGES if name != "critic" or with_critic)


def estimate_memory(inputs: EstimateInputs, stages: Sequence[str] = ()) -> MemoryEstimate:
    """Estimate ``stages``, or all that run a model.

    ``ConfigError`` for one that runs no model, or whose launch settings contradict.
    """
    planned = planned_stages(inputs.params)
    for name in stages:
        if name not in planned:
            raise ConfigError(f"stage '{name}' is not one that memory is planned for; {nearest(name, planned)}")
    names = [name for name in planned if name in (stages or planned)]
    return MemoryEstimate(inputs, tuple(estimate_stage(inputs, name) for name in names))


def estimate_stage(inputs: EstimateInputs, stage: str) -> StageEstimate:
    """Estimate one stage. ``ConfigError`` where its launch settings contradict one another."""
    layout = parallel_layout(inputs.params, stage, inputs.root)
    roles, uses, loading = STAGES[stage](StageInputs(**vars(inputs), layout=layout))
    phases = {"loading": loading, **{name: held(roles) + use for name, use in uses.items()}}
    if "step" in phases:
        # Each trained model leaves its engine, while the others stay as they are. DeepSpeed's weights are gathered in
        # host memory once for a comparison on the whole model, which ZeRO 3 gathers; only then are they freed, and a
        # plain model takes their place. Plain torch saves the model as it is. What was saved is compared on the CPU.
        saving = [held(roles)]
        for role in roles if layout.engine == "deepspeed" else ():
            if role.variant.trained != "nothing":
                saving += [held(roles) + at_work(role), held(one for one in roles if one is not role) + whole(role)]
        phases["saving"] = largest(saving)
    return StageEstimate(stage, layout, tuple(roles), phases)


def _training(
    inputs: StageInputs,
    role: ModelRole,
    config: SftConfig | DpoConfig | RejectionSamplingConfig,
    batch: Callable[[int], BatchShape],
) -> dict[str, MemoryUse]:
    """A step on texts: micro-batches, whose shapes ``batch`` gives by their size, and the optimiser."""
    rows = inputs.layout.share(config.batch_size)
    micro = min(config.micro_batch_size or config.batch_size, rows)
    update = passes.reply_loss(role.variant, batch(micro), rows > micro, inputs.layout.logits_bytes)
    return {"update": role.peak_of_update(update), "step": optimizer_step(role)}


def _rollout_phases(
    inputs: StageInputs,
    batch: int,
    policy: ModelRole,
    critic: ModelRole | None,
    reference: ModelRole | None,
    trained: Sequence[ModelRole],
    scorers: Sequence[ModelRole],
) -> dict[str, MemoryUse]:
    """Generation, scoring by policy, reference and critic, and rewards, with trained models whole and frozen ones
    brought in. In critic pre-training, where the policy is not trained, it is its own reference."""
    references = [reference] if reference is not None else []
    gathered = at_work(*trained, *references, *scorers)
    rollout_memory = _rollout_tensors(inputs, batch) + gathered
    rows = inputs.layout.share(batch)
    together = min(inputs.params.ppo.sampling_batch_size or rows, rows)
    part = _pass_batch(inputs, rows)
    generation = _generation(inputs, policy, together)
    scoring = passes.reply_statistics(
        policy.variant.in_inference,
        part,
        inputs.sampling,
        entropies=True,
        reference="frozen" if policy in trained else "own",
        exact_kl=policy in trained and inputs.params.ppo.kl.measures_full,
        critic=critic.variant if critic else None,
        logits_bytes=inputs.layout.logits_bytes,
    )
    rewards = passes.reply_scores(inputs.variant("scalar"), part)
    return {
        "generation": largest(generation) + gathered,
        "scoring": largest(scoring) + gathered_by_one(references) + rollout_memory,
        "rewards": largest(rewards) + gathered_by_one(scorers) + rollout_memory,
    }


def _generation(inputs: StageInputs, policy: ModelRole, rows: int) -> Sequence[MemoryUse]:
    """What sampling takes here: nothing where a server samples, to which the weights are given whole."""
    if inputs.params.ppo.sampler.kind != "local":
        return []
    return passes.generation(policy.variant, rows, inputs.lengths.prompt, inputs.sampling)


def _pass_batch(inputs: StageInputs, rows: int) -> BatchShape:
    """The heaviest pass of scoring or of an update over replies of full length, of ``rows`` in all.

    A budget of tokens has room for more replies to shorter prompts. That takes more memory where logits are made of all
    of them at once; such a pass is taken to be as wide as the budget allows, too.
    """
    limits = MicroBatchLimits(inputs.params.ppo.micro_batch_size, inputs.params.ppo.micro_batch_tokens)
    longest = inputs.rollout_batch(1).width
    if limits.tokens is None or not changes_logits(inputs.architecture.config(None)):
        return BatchShape(min(limits.most_rows(longest), rows), longest)
    shortest = inputs.params.ppo.max_new_tokens + 1
    most = min(limits.most_rows(shortest), rows)
    return BatchShape(most, min(longest, max(limits.tokens // most, shortest)))


def _minibatch(inputs: StageInputs, replies: int, minibatches: int) -> tuple[BatchShape, bool]:
    """The heaviest pass of a step on a part of ``replies``, and whether others come before it."""
    rows = inputs.layout.share(-(-replies // minibatches))
    batch = _pass_batch(inputs, rows)
    return batch, rows > batch.rows


def _selection(inputs: StageInputs, policy: ModelRole, frozen: Sequence[ModelRole]) -> MemoryUse:
    """Replies of the policy, their log-probabilities under the reference and the judges' scores, batch by batch."""
    selection = inputs.params.ppo.selection
    rows = min(inputs.layout.share(selection.prompts), selection.batch_size)
    batch = inputs.rollout_batch(rows)
    generation = _generation(inputs, policy, rows)
    drift = passes.reply_statistics(inputs.variant("causal_lm"), batch, inputs.sampling)
    judging = passes.reply_scores(inputs.variant("scalar"), batch)
    return largest([*generation, largest([*drift, *judging]) + gathered_by_one(frozen)])


def _rollout_tensors(inputs: StageInputs, rows: int) -> MemoryUse:
    """The rollout, which every GPU holds: tokens and masks (int64, the sampler's and copies), some twenty tensors of
    float32 for each reply token."""
    batch, reply = inputs.rollout_batch(rows), inputs.params.ppo.max_new_tokens
    return MemoryUse(other=batch.tokens * 8 * 2 * 2 + rows * reply * 4 * 20)

"""What each stage needs: its models, and the passes that its phases make (stages/, training/, ppo/,
evaluation/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhf_core.config.base import SftConfig
from rlhf_core.config.params import Params
from rlhf_core.config.policy import DpoConfig, RejectionSamplingConfig
from rlhf_core.config.problems import nearest
from rlhf_core.config.reward import RewardConfig
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.perplexity import POSITIONS_PER_CHUNK, ROWS_PER_PASS
from rlhf_core.models.architecture import changes_logits
from rlhf_core.ppo.rejection_sampling import PROMPTS_AT_ONCE
from rlhf_core.sampling.distribution import EvaluationSampling, Sampling
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.training.dpo import scoring_rows
from rlhf_core.training.loop import ROOM
from rlhf_core.training.reward.first_fits import rows_to_pool
from rlhf_core.training.reward.trainer import rows_to_score
from rlhf_core.training.sft import held_out_rows
from rlhf_extras.memory import passes
from rlhf_extras.memory.dry_run import (
    NOTHING,
    MemoryUse,
    Moments,
    largest,
    model_size,
    together,
)
from rlhf_extras.memory.sequence_lengths import BatchShape
from rlhf_extras.memory.sharding import (
    parallel_layout,
    trained_footprint,
)
from rlhf_extras.memory.stage_plan import EstimateInputs, ModelRole, StagePlan
from rlhf_extras.memory.workload import working_stages


def sft_stage(plan: StagePlan) -> None:
    """Supervised fine-tuning: micro-batches of demonstrations, to train on and to hold out."""
    config, data, limit = (
        plan.inputs.params.sft,
        plan.inputs.lengths.demonstrations,
        plan.layout.logits_bytes,
    )
    built = plan.variant("causal_lm")
    policy = (
        plan.trained("policy", built)
        if config.steps
        else plan.frozen("policy", built, on_device=True)
    )
    plan.begin([policy], policy.loading)
    held_out = data.batch(held_out_rows(config))
    evaluation = passes.reply_loss(policy.variant.in_inference, held_out, logits_bytes=limit)
    plan.add("evaluation", largest(evaluation), policy.at_work)
    if config.steps:
        _train_on_texts(plan, "sft", config, policy, data.batch)


def reward_stage(plan: StagePlan) -> None:
    """Reward models: token-budget batches of pairs, of which each GPU takes its share in one
    pass.
    """
    config: RewardConfig = getattr(plan.inputs.params, plan.stage)
    limits, lengths = config.batch, plan.inputs.lengths.pairs
    built = plan.variant("reward", config.layers)
    if config.steps:
        model = plan.trained(plan.stage, built, config.lora)
    else:
        model = plan.frozen(plan.stage, built, on_device=True)
    plan.begin([model], model.whole)

    def reading(rows: int) -> MemoryUse:
        return largest(passes.reply_scores(model.variant, BatchShape(rows, lengths.width)))

    scored_at_once = rows_to_score(lengths.width)
    plan.add("evaluation", reading(scored_at_once), model.at_work)
    sharded = plan.layout.zero == 3  # while it is trained; before and after it is whole
    if sharded:
        plan.phases["test"] = model.whole + reading(scored_at_once)
    if config.linear_probe is not None:
        plan.add(
            "linear probe",
            reading(rows_to_pool(lengths.width)),
            model.whole if sharded else model.at_work,
        )
    if config.steps:
        batch = lengths.pairs(limits.token_budget, limits.min_pairs, limits.max_pairs)
        pairs = batch.rows // 2
        own = plan.layout.share(pairs)
        imitated = -(-batch.scored * own // pairs) if config.imitation > 0 else 0
        update = passes.pair_loss(
            model.variant, BatchShape(2 * own, batch.width, imitated), plan.layout.logits_bytes
        )
        plan.add("update", model.peak_of_update(update))
        plan.add("step", model.step)


def critic_stage(plan: StagePlan) -> None:
    """Critic pre-training: the frozen SFT policy rolls out and is its own reference; the critic
    learns the returns.
    """
    config, scorers = plan.inputs.params.critic, plan.reward_models()
    policy = plan.frozen("policy", plan.variant("causal_lm"), on_device=plan.layout.gathers)
    if plan.inputs.params.ppo.critic_mode == "shared":
        head = replace(plan.variant("scalar"), trained="value_head")
        critic = ModelRole(
            name="critic", variant=head, **vars(trained_footprint(model_size(head), plan.layout))
        )
    else:
        critic = plan.critic(config.lora)
    plan.begin(
        [policy, critic, *scorers],
        together([policy.loading, critic.loading, _loaded_one_by_one(scorers)]),
    )
    rollout = _roll_out(plan, config.batch_size, scorers, critic)
    batch, accumulated = _minibatch(plan, config.batch_size, config.minibatches)
    update = passes.value_loss(critic.variant, batch, plan.sampling, accumulated)
    plan.add("update critic", critic.peak_of_update(update), rollout)
    plan.add("step", critic.step, rollout)


def ppo_stage(plan: StagePlan) -> None:
    """PPO: rollout, updates of policy and critic, and the selection of checkpoints by reward model
    and referee.

    With adapters on the policy the reference is the policy without them; a shared critic is the
    policy with a head, and critic-free advantages need none.
    Gradients of the policy wait while the critic's are computed, since both step together.
    """
    config, logits_bytes = plan.inputs.params.ppo, plan.layout.logits_bytes
    policy = plan.trained("policy", plan.variant("causal_lm"), config.policy_lora)
    own_critic = config.critic_mode == "separate" and not config.advantage.critic_free
    critic = plan.ppo_critic() if own_critic else None
    trained = [policy, *([critic] if critic else [])]
    reference = (
        plan.frozen("reference", plan.variant("causal_lm")) if config.policy_lora is None else None
    )
    scorers = [role for role in plan.reward_models() if role.name != "reward"]
    if plan.inputs.params.collect.pairs:
        scorers += [plan.judging("reward"), plan.judging("referee")]
    frozen = [*([reference] if reference else []), *scorers]
    selection = _selection(plan, policy, frozen)
    # Models are loaded whole: the reference, each scorer before it is placed, SFT's replies for the
    # selection; then the reference is placed, and policy and critic follow. Where the policy is the
    # reference, it is packed at once.
    first = policy.loaded
    if reference is not None:
        first = reference.whole if plan.layout.gathers else reference.loading
    last = reference.held + policy.loading if reference else policy.loaded
    sft = plan.frozen("sft", plan.variant("causal_lm"), on_device=True)
    placed = together(one.held for one in scorers)
    loading = [
        policy.whole if reference is None else NOTHING,
        together([first, placed, *(one.loading for one in scorers[-1:])]),
        together(
            [first, placed, *(one.at_work for one in scorers), _selection(plan, sft, scorers)]
        ),
        together([last, placed, *([critic.loading] if critic else [])]),
    ]
    plan.begin([*trained, *frozen], largest(loading))
    rollout = _roll_out(plan, config.batch_size, scorers, critic, reference)
    batch, accumulated = _minibatch(plan, config.batch_size, config.minibatches)
    exact_kl = (
        config.kl.placement == "loss"
        and config.kl.estimator == "full"
        and config.kl.coefficient > 0
    )
    update = passes.reply_statistics(
        policy.variant,
        batch,
        plan.sampling,
        entropies=config.entropy.kind != "off",
        reference="frozen" if exact_kl else "none",
        accumulated=accumulated,
        logits_bytes=logits_bytes,
    )
    plan.add("update policy", policy.peak_of_update(update), rollout)
    if config.ptx.weight > 0:
        size = config.ptx.micro_batch_size or config.micro_batch_size or config.ptx.batch_size
        rows = min(size, plan.layout.share(config.ptx.batch_size))
        if config.ptx.micro_batch_size is None:
            plan.bounded("ppo.micro_batch_size", rows)
        update = passes.reply_loss(
            policy.variant, plan.inputs.lengths.ptx.batch(rows), True, logits_bytes
        )
        plan.add("update ptx", policy.peak_of_update(update), rollout)
    if critic is not None:
        waiting = MemoryUse(gradients=policy.step.gradients)
        update = passes.value_loss(critic.variant, batch, plan.sampling, accumulated)
        plan.add("update critic", critic.peak_of_update(update), waiting, rollout)
    plan.add("step", *(role.step for role in trained), rollout)
    plan.add("selection", selection, policy.at_work, *(role.at_work for role in frozen), rollout)


def dpo_stage(plan: StagePlan) -> None:
    """DPO: the policy alone, on both replies of each pair; as its own reference it is read once
    before training.
    """
    params, lengths = plan.inputs.params, plan.inputs.lengths.pairs
    config = params.policy.dpo
    policy = plan.trained("policy", plan.variant("causal_lm"), params.ppo.policy_lora)
    plan.begin([policy], policy.whole)
    read = lengths.batch(scoring_rows(config))
    reference = passes.reply_loss(
        policy.variant.in_inference, read, logits_bytes=plan.layout.logits_bytes
    )
    plan.add("log-probabilities", largest(reference), policy.at_work)
    _train_on_texts(plan, "policy.dpo", config, policy, lambda pairs: lengths.batch(2 * pairs))


def rejection_sampling_stage(plan: StagePlan) -> None:
    """Rejection sampling: the policy samples, the reward sources score, and the policy is
    fine-tuned on the best.

    The scorers are counted throughout, although they are freed before the fine-tuning.
    """
    config, scorers = plan.inputs.params.policy.rejection_sampling, plan.reward_models()
    policy = plan.trained("policy", plan.variant("causal_lm"), plan.inputs.params.ppo.policy_lora)
    plan.begin([policy, *scorers], policy.whole + _loaded_one_by_one(scorers))
    _roll_out(plan, PROMPTS_AT_ONCE * config.replies_per_prompt, scorers)
    del plan.phases["scoring"], plan.rows["ppo.micro_batch_size"]  # no log-probabilities are needed
    _train_on_texts(plan, "policy.rejection_sampling", config, policy, plan.rollout_batch)


def evaluate_stage(plan: StagePlan) -> None:
    """The evaluation: SFT, policy and judges are in memory one after the other.

    Replies are sampled with the evaluation's filters and without; the latter are scored under SFT.
    Both models read held-out text.
    """
    config, prompt = plan.inputs.params.evaluate, plan.inputs.lengths.prompt
    model = plan.frozen("model", plan.variant("causal_lm"))
    judge = plan.frozen("judge", plan.variant("scalar", plan.inputs.params.judge.layers))
    model_weights, judge_weights = (one.held + one.running for one in (model, judge))
    plan.begin([], model.loading)
    rows, unfiltered_rows = (
        min(config.batch_size, config.prompts),
        min(config.batch_size, config.kl_samples),
    )
    plan.bounded("evaluate.batch_size", rows)
    unfiltered = Sampling(-1, 0, config.max_new_tokens, forbidden_ids=(0,))
    judged_base = replace(unfiltered, max_new_tokens=config.sampling.max_new_tokens)
    judged_sampling = EvaluationSampling(
        judged_base, config.sampling.top_p, config.sampling.repetition_penalty
    )
    drift = BatchShape(unfiltered_rows, prompt + config.max_new_tokens)
    judged = BatchShape(rows, prompt + config.sampling.max_new_tokens)
    generation: list[MemoryUse] = []
    if config.sampler.kind == "local":
        generation += passes.generation(model.variant, rows, prompt, judged_sampling)
        generation += passes.generation(model.variant, unfiltered_rows, prompt, unfiltered)
    width = min(config.perplexity.max_tokens, plan.inputs.lengths.pairs.width)
    text = BatchShape(ROWS_PER_PASS, width, min(ROWS_PER_PASS * width, POSITIONS_PER_CHUNK))
    plan.add("generation", largest(generation), model_weights)
    plan.add("perplexity", largest(passes.reply_loss(model.variant, text)), model_weights)
    plan.add(
        "drift", largest(passes.reply_statistics(model.variant, drift, unfiltered)), model_weights
    )
    plan.add("judging", largest(passes.reply_scores(judge.variant, judged)), judge_weights)


def _train_on_texts(
    plan: StagePlan,
    section: str,
    config: SftConfig | DpoConfig | RejectionSamplingConfig,
    role: ModelRole,
    batch: Callable[[int], BatchShape],
) -> None:
    """A step on texts: micro-batches, whose shapes ``batch`` gives by their size, and the
    optimiser.
    """
    rows = plan.layout.share(config.batch_size)
    micro = plan.bounded(
        f"{section}.micro_batch_size", min(config.micro_batch_size or config.batch_size, rows)
    )
    update = passes.reply_loss(role.variant, batch(micro), rows > micro, plan.layout.logits_bytes)
    plan.add("update", role.peak_of_update(update))
    plan.add("step", role.step)


def _roll_out(
    plan: StagePlan,
    batch: int,
    scorers: Sequence[ModelRole],
    critic: ModelRole | None = None,
    reference: ModelRole | None = None,
) -> MemoryUse:
    """Add generation, scoring by policy, reference and critic, and rewards, with trained models
    whole and frozen ones brought in. In critic pre-training, where the policy is not trained, it is
    its own reference.

    Returns:
        The rollout, which every GPU holds from then on: tokens and masks (int64, the sampler's and
            copies), some twenty
        tensors of float32 for each reply token.
    """
    policy, ppo = plan.roles[0], plan.inputs.params.ppo
    is_trained = policy.variant.trained != "nothing"
    rows = plan.layout.share(batch)
    at_once = plan.bounded("ppo.sampling_batch_size", min(ppo.sampling_batch_size or rows, rows))
    part = _pass_batch(plan, rows)
    scoring = passes.reply_statistics(
        policy.variant.in_inference,
        part,
        plan.sampling,
        entropies=True,
        reference="frozen" if is_trained else "own",
        exact_kl=is_trained and ppo.kl.measures_full,
        critic=critic.variant if critic else None,
        logits_bytes=plan.layout.logits_bytes,
    )
    rewards = passes.reply_scores(plan.variant("scalar"), part)
    reply_tokens = batch * ppo.max_new_tokens
    rollout = MemoryUse(other=plan.rollout_batch(batch).tokens * 8 * 2 * 2 + reply_tokens * 4 * 20)
    brought_in = together(role.at_work for role in plan.roles)
    plan.add("generation", largest(_generation(plan, policy, at_once)), brought_in)
    alone = policy.running if not is_trained else reference.running if reference else NOTHING
    plan.add("scoring", largest(scoring), alone, brought_in, rollout)
    plan.add(
        "rewards", largest(rewards), largest(one.running for one in scorers), brought_in, rollout
    )
    return rollout


def _loaded_one_by_one(scorers: Sequence[ModelRole]) -> MemoryUse:
    """The last of the scorers as it is loaded, before it is placed as those before it are."""
    return together([*(one.held for one in scorers[:-1]), *(one.loading for one in scorers[-1:])])


def _generation(plan: StagePlan, policy: ModelRole, rows: int) -> Moments:
    """What sampling takes here: nothing where a server samples, to which the weights are given
    whole.
    """
    if plan.inputs.params.ppo.sampler.kind != "local":
        return ()
    return passes.generation(policy.variant, rows, plan.inputs.lengths.prompt, plan.sampling)


def _pass_batch(plan: StagePlan, rows: int) -> BatchShape:
    """The heaviest pass of scoring or of an update over replies of full length, of ``rows`` in all.

    A budget of tokens has room for more replies to shorter prompts. That takes more memory where
    logits are made of all of them at once; such a pass is taken to be as wide as the budget allows,
    too.
    """
    ppo = plan.inputs.params.ppo
    limits = MicroBatchLimits(ppo.micro_batch_size, ppo.micro_batch_tokens)
    longest = plan.rollout_batch(1).width
    width = longest
    if limits.tokens is not None and changes_logits(plan.inputs.architecture.config()):
        width = ppo.max_new_tokens + 1  # of the shortest prompt
    most = plan.bounded("ppo.micro_batch_size", min(limits.most_rows(width), rows))
    return BatchShape(most, min(longest, max((limits.tokens or 0) // most, width)))


def _minibatch(plan: StagePlan, replies: int, minibatches: int) -> tuple[BatchShape, bool]:
    """The heaviest pass of a step on a part of ``replies``, and whether others come before it."""
    rows = plan.layout.share(-(-replies // minibatches))
    batch = _pass_batch(plan, rows)
    return batch, rows > batch.rows


def _selection(plan: StagePlan, policy: ModelRole, frozen: Sequence[ModelRole]) -> MemoryUse:
    """Replies of the policy, their log-probabilities under the reference and the judges' scores,
    batch by batch.
    """
    selection = plan.inputs.params.ppo.selection
    rows = min(plan.layout.share(selection.prompts), selection.batch_size)
    batch = plan.rollout_batch(plan.bounded("ppo.selection.batch_size", rows))
    generation = _generation(plan, policy, rows)
    drift = passes.reply_statistics(plan.variant("causal_lm"), batch, plan.sampling)
    judging = passes.reply_scores(plan.variant("scalar"), batch)
    return largest(
        [*generation, largest([*drift, *judging]) + largest(one.running for one in frozen)]
    )


def policy_stage(plan: StagePlan) -> None:
    """The stage ``ppo`` by the method that trains the policy."""
    by_method = {"ppo": ppo_stage, "dpo": dpo_stage, "rejection_sampling": rejection_sampling_stage}
    by_method[plan.inputs.params.policy.method](plan)


STAGES: dict[str, Callable[[StagePlan], None]] = {
    "sft": sft_stage,
    "reward": reward_stage,
    "referee": reward_stage,
    "judge": reward_stage,
    "critic": critic_stage,
    "ppo": policy_stage,
    "evaluate": evaluate_stage,
}


def planned_stages(params: Params) -> tuple[str, ...]:
    """The stages that run a model and whose memory is planned: all but the pre-training of one made
    from nothing.
    """
    return tuple(name for name in working_stages(params) if name in STAGES)


def require_planned(params: Params, stages: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a stage that runs no model."""
    planned = planned_stages(params)
    for name in stages:
        if name not in planned:
            raise ConfigError(
                f"stage '{name}' is not one that memory is planned for; {nearest(name, planned)}"
            )


def plan_stages(inputs: EstimateInputs, stages: Sequence[str] = ()) -> list[StagePlan]:
    """Plan ``stages``, or all that run a model.

    ``ConfigError`` for one that runs no model, or whose launch settings contradict.
    """
    require_planned(inputs.params, stages)
    planned = planned_stages(inputs.params)
    return [plan_stage(inputs, name) for name in planned if name in (stages or planned)]


def plan_stage(inputs: EstimateInputs, stage: str) -> StagePlan:
    """Plan one stage. ``ConfigError`` where its launch settings contradict one another."""
    plan = StagePlan(inputs, stage, parallel_layout(inputs.params, stage, inputs.root))
    STAGES[stage](plan)
    if "step" in plan.phases:
        # Each trained model leaves its engine, while the others stay as they are. DeepSpeed's
        # weights are gathered in host memory once it has computed what is compared; only then are
        # they freed, and a plain model takes their place. Under ZeRO 3 that one stays in host
        # memory in PPO and critic pre-training, and where it is too large. Plain torch saves the
        # model as it is. What was saved is compared on the CPU.
        saving, room = (
            [together(role.held for role in plan.roles)],
            ROOM * (inputs.limit or math.inf),
        )
        for role in plan.roles if plan.layout.engine == "deepspeed" else ():
            if role.variant.trained != "nothing":
                others = together(one.held for one in plan.roles if one is not role)
                on_host = plan.layout.zero == 3 and (
                    stage in ("critic", "ppo") or role.whole.total > room
                )
                saving += [
                    others + role.held + role.running,
                    others + (NOTHING if on_host else role.whole),
                ]
        plan.phases["saving"] = largest(saving)
    return plan

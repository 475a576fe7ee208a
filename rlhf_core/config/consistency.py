"""Checks of params.yaml that look at several sections at once."""

from __future__ import annotations

from rlhf_core.config.base import PRETRAINED_PROFILE, is_pretrained
from rlhf_core.config.gates import CHECKER, LOSSES, PROBES, WORLD_PROBES, Condition
from rlhf_core.config.health import rules_for
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.config.params import Params
from rlhf_core.config.problems import nearest
from rlhf_core.config.rates import ADAPTER_LR, FULL_LR, rate_is_too_high
from rlhf_core.config.reward_sources import FunctionSource
from rlhf_core.errors import ConfigError


def require_consistent(params: Params) -> None:
    """Check what no section can tell alone.

    Raises:
        ConfigError: The first contradiction, with what to change.
    """
    # Not a check of PpoConfig: critic pre-training reads that too, and a changed rule must not
    # train the critic again.
    rules_for(params.ppo.health, params.ppo.kl.coefficient)
    shortest, longest = params.ppo.min_new_tokens, params.evaluate.max_new_tokens
    if shortest >= longest:
        raise ConfigError(
            f"evaluate.max_new_tokens {longest} is not above ppo.min_new_tokens {shortest}: no reply "
            "of the evaluation could end; raise the one or lower the other"
        )
    _refuse_high_learning_rates(params)
    if not params.collect.pairs:
        _functions_reward_and_judge(params)
    if params.ppo.critic_mode == "shared":
        _critic_is_a_head(params)
    for number, condition in enumerate(params.gates.policy):
        _is_measured(f"gates.policy[{number}] asks for {condition.metric}", condition, params)
    if not params.collect.pairs and params.gates.mode == "enforce":
        _held_out_prompts_decide(params)
    _gated_probes_can_be_formed(params)
    if params.ppo.share_base:
        _base_can_be_shared(params)
    _launch_fits(params)
    _pools_fit(params)


def _refuse_high_learning_rates(params: Params) -> None:
    """Refuse learning rates that would wreck a pretrained model, or adapters on one."""
    if not is_pretrained(params.base.source) or params.base.allow_high_learning_rates:
        return
    ppo, policy, critic = params.ppo, params.policy, params.critic
    # Path of each rate, its peak, and whether it is that of adapters.
    rates = [
        ("sft", params.sft.optimizer.lr, False),
        ("reward", params.reward.optimizer.lr, params.reward.lora is not None),
        ("referee", params.referee.optimizer.lr, params.referee.lora is not None),
        ("judge", params.judge.optimizer.lr, params.judge.lora is not None),
    ]
    rates = [(f"{name}.optimizer.lr", lr, adapters) for name, lr, adapters in rates]
    adapted = ppo.policy_lora is not None
    if policy.method == "ppo":
        rates.append(("ppo.policy_optimizer.lr", ppo.policy_optimizer.lr, adapted))
        # With a shared backbone critic pre-training moves a new value head alone.
        if ppo.critic_mode != "shared" and not ppo.advantage.critic_free:
            rates.append(("critic.optimizer.lr", critic.optimizer.lr, critic.lora is not None))
            if ppo.critic_optimizer is not None:
                shared = ppo.share_base and critic.lora is not None
                on_base = ppo.critic_lora is not None or shared
                rates.append(("ppo.critic_optimizer.lr", ppo.critic_optimizer.lr, on_base))
    else:
        lr = getattr(policy, policy.method).optimizer.lr
        rates.append((f"policy.{policy.method}.optimizer.lr", lr, adapted))
    high = []
    for path, lr, adapters in rates:
        if rate_is_too_high(lr, adapters):
            suitable = ADAPTER_LR if adapters else FULL_LR
            high.append(f"{path} {lr:g} (about {suitable:g})")
    if high:
        raise ConfigError(
            "base.source is a pretrained model, which learning rates this high wreck within a few "
            f"steps: {', '.join(high)}; lower them, start from the profile {PRETRAINED_PROFILE}, or "
            "insist with base.allow_high_learning_rates true"
        )


def _functions_reward_and_judge(params: Params) -> None:
    """Check that nothing asks for a model of pairs where there are none."""
    ppo, needs = params.ppo, "collect.pairs is false"
    for source in ppo.reward.sources:
        if not isinstance(source, FunctionSource):
            raise ConfigError(
                f"{needs}, so that functions alone reward, but ppo.reward.sources has one of kind "
                f"{source.kind}: name functions, such as {{kind: function, target: 'checks:score'}}"
            )
    if params.policy.method != "ppo":
        raise ConfigError(
            f"{needs}, but policy.method {params.policy.method} learns from models of pairs: set ppo"
        )
    if ppo.selection.method == "referee":
        raise ConfigError(
            f"{needs}, so there is no referee that selects a checkpoint: set ppo.selection.method last"
        )
    if ppo.share_base:
        raise ConfigError(
            f"{needs}, so there are no reward models to share a base with: set ppo.share_base false"
        )
    own_critic = not ppo.advantage.critic_free and ppo.critic_mode != "shared"
    if own_critic and params.critic.init == "reward":
        raise ConfigError(
            f"{needs}, so there is no reward model for the critic to start from: set critic.init sft, or "
            "ppo.advantage.estimator grpo or rloo, which need no critic"
        )
    if ppo.ptx.weight and not _has_texts(params):
        missing = "demonstrations" if ppo.ptx.data == "both" else ppo.ptx.data
        raise ConfigError(
            f"ppo.ptx.weight is {ppo.ptx.weight:g}, but collect.files names no texts for it: set it "
            f"to 0, or give {missing}"
        )
    if params.evaluate.best_of_n:
        raise ConfigError(
            f"{needs}, so there is no reward model that chooses a best reply: set evaluate.best_of_n 0"
        )


def _has_texts(params: Params) -> bool:
    """Whether there are texts of the kind that ``ppo.ptx.data`` names."""
    files = params.collect.files
    if params.ppo.ptx.data == "demonstrations":
        return bool(files.demonstrations)
    return bool(files.pretrain or files.demonstrations)  # plain texts are derived from these


def _held_out_prompts_decide(params: Params) -> None:
    asked: set[str] = set()
    for condition in params.gates.policy:
        asked |= condition.parts
    if CHECKER not in asked:
        raise ConfigError(
            "gates.policy asks nothing of comparison.checker, so a policy would pass by its reward on training "
            "prompts: add a condition such as {metric: comparison.checker.win_rate_low95, at_least: 0.5, why: …}"
        )


def _base_can_be_shared(params: Params) -> None:
    policy = params.ppo.policy_lora
    for name, scalar in (("reward", params.reward), ("referee", params.referee)):
        if policy is None or scalar.lora is None or scalar.init != "sft":
            raise ConfigError(
                "ppo.share_base needs policy, reward model and referee as adapters on the SFT model: set "
                f"ppo.policy_lora, {name}.lora and {name}.init sft, or ppo.share_base false"
            )
        if scalar.lora.quantize != policy.quantize:
            raise ConfigError(
                f"ppo.share_base: {name}.lora.quantize is {scalar.lora.quantize}, but ppo.policy_lora.quantize is "
                f"{policy.quantize}: on weights that are rounded otherwise it would not score as it was trained; "
                "set both alike"
            )
    launch = params.compute.launch.get("ppo", LaunchConfig())
    if launch.frozen != "device" or launch.zero == 3 or launch.deepspeed is not None:
        raise ConfigError(
            "ppo.share_base keeps one copy of the weights on every rank: leave compute.launch.ppo.frozen at device "
            "and zero below 3, without a DeepSpeed file, or set ppo.share_base false"
        )
    if params.ppo.advantage.critic_free or params.critic.lora is None or policy is None:
        return
    if params.ppo.critic_lora is not None:
        raise ConfigError(
            "ppo.critic_lora with ppo.share_base and critic.lora: the critic goes on with the adapters that it was "
            "pre-trained as; set ppo.critic_lora to null"
        )
    # On the reward model it is pre-trained on weights into which that one's adapters were
    # merged, as they are.
    wanted = policy.quantize if params.critic.init == "sft" else None
    if params.critic.lora.quantize != wanted:
        raise ConfigError(
            f"critic.lora.quantize is {params.critic.lora.quantize}, but with ppo.share_base and critic.init "
            f"{params.critic.init} it must be {wanted}: else its values would be those of other weights"
        )


def _is_measured(asked: str, condition: Condition, params: Params) -> None:
    """Check that the policy's evaluation measures what a condition reads; ``asked`` names both."""
    evaluate, pairs, world = params.evaluate, params.collect.pairs, params.collect.source == "world"
    parts = condition.parts
    of_pairs = parts & {"reward", "referee", "judge", "perplexity_preferred"}
    if of_pairs and not pairs:
        raise ConfigError(
            f"{asked}, but collect.pairs is false, so there is no {sorted(of_pairs)[0]}: take the "
            "condition out, or start from the profile checker"
        )
    if CHECKER in parts and pairs:
        raise ConfigError(
            f"{asked}, but reward functions judge only where collect.pairs is false: take the condition out"
        )
    if "gold" in parts and not world:
        raise ConfigError(
            f"{asked}, but collect.source is files, and only the synthetic world has a gold judge: take the "
            "condition out, or start from the profile own-data"
        )
    # The world's own harmful prompts measure all losses but that of log odds.
    of_world = world and LOSSES in parts and "refusal_log_odds" not in parts
    if "safety" in parts and not of_world:
        if evaluate.safety.prompts and world:
            raise ConfigError(
                f"{asked}, but evaluate.safety.prompts are not asked in the synthetic world, which "
                "has its own: take the condition out"
            )
        if not evaluate.safety.prompts:
            raise ConfigError(
                f"{asked}, but evaluate.safety.prompts is 0: take the condition out, or set "
                "evaluate.safety.prompts"
            )
    texts = parts & {"perplexity_preferred", "perplexity_pretrain"}
    if texts and not evaluate.perplexity.rows:
        raise ConfigError(
            f"{asked}, but evaluate.perplexity.rows is 0: take the condition out, or set "
            "evaluate.perplexity.rows"
        )
    if "kl_full" in parts and not params.ppo.kl.measures_full:
        raise ConfigError(
            f"{asked}, which is not measured: set ppo.kl.measure_full to true, or take the condition out"
        )
    first: set[str] = set()
    for metric in condition.metrics:
        first.update(metric.split(".")[:2])
    for name in ("verifiable", "multiple_choice", "opponents"):
        if name in first and not getattr(evaluate, name):
            raise ConfigError(
                f"{asked}, but evaluate.{name} is not set: take the condition out, or set evaluate.{name}"
            )


def _gated_probes_can_be_formed(params: Params) -> None:
    if params.gates.reward is None and params.collect.pairs:
        raise ConfigError(
            "gates.reward is null, but collect.pairs is true: give the reward model its conditions"
        )
    for number, condition in enumerate(params.gates.reward or ()):
        for kind in condition.probes:
            asked = f"gates.reward[{number}] asks for {condition.metric}"
            known = (*PROBES, *WORLD_PROBES)
            if kind not in known:
                raise ConfigError(f"{asked}, but there is no such probe; {nearest(kind, known)}")
            if kind in WORLD_PROBES and params.collect.source != "world":
                raise ConfigError(
                    f"{asked}, but collect.source is files, and only questions of the synthetic world have right "
                    f"and wrong answers that are known: ask for one of {', '.join(PROBES)}, or start from the "
                    "profile own-data"
                )


def _critic_is_a_head(params: Params) -> None:
    if "init" in params.critic.model_fields_set and params.critic.init != "sft":
        raise ConfigError(
            f"critic.init {params.critic.init} with ppo.critic_mode shared: the value head sits on the policy, which "
            "starts as the SFT model; leave critic.init out, or use ppo.critic_mode separate"
        )
    if params.critic.lora is not None:
        raise ConfigError(
            "critic.lora with ppo.critic_mode shared: only the value head is pre-trained, on the frozen SFT model, "
            "so adapters would go untrained; leave critic.lora out, or use ppo.critic_mode separate"
        )


def _launch_fits(params: Params) -> None:
    launch = params.compute.launch.get("ppo", LaunchConfig())
    if launch.engine == "deepspeed" and params.ppo.critic_mode == "shared":
        raise ConfigError(
            "ppo.critic_mode shared trains policy and value head in one pass, which engine local alone is known to "
            "do on several ranks: launch ppo with engine local, or use ppo.critic_mode separate"
        )
    if launch.engine == "deepspeed" and params.ppo.gradient_norm == "joint":
        raise ConfigError(
            "ppo.gradient_norm joint needs the norms of two models before either steps, which engine deepspeed "
            "does not tell: use separate, or launch ppo with engine local"
        )
    kl = params.ppo.kl
    exact_in_loss = kl.placement == "loss" and kl.estimator == "full" and kl.coefficient > 0
    if launch.frozen == "offload" and exact_in_loss:
        raise ConfigError(
            "ppo.kl.estimator full in the loss runs the reference in every update: it cannot wait in CPU memory, "
            "so set compute.launch.ppo.frozen to device or sharded"
        )
    evaluation = params.compute.launch.get("evaluate", LaunchConfig())
    if evaluation.frozen == "sharded" and params.evaluate.sampler.kind == "local":
        raise ConfigError(
            "compute.launch.evaluate.frozen sharded leaves no rank a whole model to sample with: let a server "
            "sample (evaluate.sampler.kind vllm), or set frozen to device"
        )
    # Small updates of bfloat16 weights round to nothing unless float32 masters take them
    # (docs/engines.md).
    for stage, launch in params.compute.launch.items():
        if params.base.dtype != "float32" and launch.engine == "deepspeed" and launch.zero == 0:
            raise ConfigError(
                f"compute.launch.{stage}.zero 0 keeps no float32 master weights of a base.dtype {params.base.dtype} "
                "model, whose small updates would round to nothing: use zero 1, 2 or 3, or engine local"
            )


def _pools_fit(params: Params) -> None:
    """Check the stages on pools: a GPU for each process, one machine or a Slurm job of several."""
    launches = {str(stage): launch for stage, launch in params.compute.launch.items()}
    shared = {job.pool: job.shared for job in params.pools.values()}
    for stage, job in params.pools.items():
        if job.shared != shared[job.pool]:
            raise ConfigError(
                f"pools.{stage}.shared is {str(job.shared).lower()}, but another stage says the opposite of the "
                f"pool {job.pool}: its workers see the workspace or they do not, so say the same of both"
            )
        launch = launches.get(stage, LaunchConfig())
        if launch.nodes != (job.nodes or 1):
            raise ConfigError(
                f"compute.launch.{stage}.nodes is {launch.nodes}, but pools.{stage}.nodes is {job.nodes or 1} "
                f"machine(s); set both to the same number, or take {stage} out of pools and start it as "
                "docs/operations.md says"
            )
        if job.gpus and job.gpus != launch.processes:
            raise ConfigError(
                f"pools.{stage}.gpus is {job.gpus}, but the stage runs as {launch.processes} process(es), one "
                "GPU each (compute.launch); set both to the same number"
            )
    for stage, launch in launches.items():
        if launch.nodes > 1 and launch.rendezvous is None and stage not in params.pools:
            raise ConfigError(
                f"compute.launch.{stage}.nodes above 1 meet somewhere: set rendezvous to host:port of one of "
                f"them, or let a Slurm job start them (pools.{stage}.nodes)"
            )

"""From params.yaml, a profile and overrides to typed sections."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from rlhf_core.config import yaml_text
from rlhf_core.config.base import SCRATCH, BaseConfig, SftConfig, is_pretrained
from rlhf_core.config.data import CollectConfig, ValidateConfig
from rlhf_core.config.evaluation import EvaluateConfig, ReportConfig
from rlhf_core.config.gates import CHECKER, LOSSES, PROBES, WORLD_PROBES, GatesConfig
from rlhf_core.config.health import DEFAULT_RULES, Check, Rule, RuleChange
from rlhf_core.config.model import LoraConfig, StageConfig, Strict
from rlhf_core.config.operations import (
    CheckpointsConfig,
    ComputeConfig,
    FlowConfig,
    LaunchConfig,
    PlanConfig,
    Pools,
    RegistryConfig,
    TrackingConfig,
    WorkPoolConfig,
)
from rlhf_core.config.policy import CriticConfig, PolicyConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.problems import describe, nearest
from rlhf_core.config.rates import ADAPTER_LR, FULL_LR, rate_is_too_high
from rlhf_core.config.reward import JudgeConfig, RefereeConfig, RewardConfig
from rlhf_core.config.reward_sources import FunctionSource
from rlhf_core.errors import ConfigError
from rlhf_core.storage.data_files import is_url

PROFILE = "pretrained"


def refuse_high_learning_rates(params: Params) -> None:
    """Check the learning rates of all that trains weights of a pretrained model, or adapters on
    them.

    Raises:
        ValueError: One of them is far beyond what suits it, and ``base.allow_high_learning_rates``
            is not set.
    """
    if not is_pretrained(params.base.source) or params.base.allow_high_learning_rates:
        return
    ppo, policy, critic = params.ppo, params.policy, params.critic
    # Peak rate by its path, and whether it is that of adapters.
    rates = {"sft.optimizer.lr": (params.sft.optimizer.lr, False)}
    for name, scalar in (
        ("reward", params.reward),
        ("referee", params.referee),
        ("judge", params.judge),
    ):
        rates[f"{name}.optimizer.lr"] = scalar.optimizer.lr, scalar.lora is not None
    adapted = ppo.policy_lora is not None
    if policy.method != "ppo":
        rates[f"policy.{policy.method}.optimizer.lr"] = (
            getattr(policy, policy.method).optimizer.lr,
            adapted,
        )
    else:
        rates["ppo.policy_optimizer.lr"] = ppo.policy_optimizer.lr, adapted
    # With a shared backbone critic pre-training moves a new value head alone.
    if policy.method == "ppo" and ppo.critic_mode != "shared" and not ppo.advantage.critic_free:
        rates["critic.optimizer.lr"] = critic.optimizer.lr, critic.lora is not None
        if ppo.critic_optimizer is not None:
            adapters = ppo.critic_lora is not None or (ppo.share_base and critic.lora is not None)
            rates["ppo.critic_optimizer.lr"] = ppo.critic_optimizer.lr, adapters
    suitable = {path: ADAPTER_LR if adapters else FULL_LR for path, (_, adapters) in rates.items()}
    high = [path for path, rate in rates.items() if rate_is_too_high(*rate)]
    if high:
        listed = ", ".join(f"{path} {rates[path][0]:g} (about {suitable[path]:g})" for path in high)
        raise ValueError(
            f"base.source is a pretrained model, which learning rates this high wreck within a few steps: {listed}; "
            f"lower them, start from the profile {PROFILE}, or insist with base.allow_high_learning_rates true"
        )


def rules_for(config: PpoConfig) -> tuple[Rule, ...]:
    """The health rules as ``ppo.health.rules`` changes them, without those it says to ignore.

    ``ConfigError`` for an unknown rule, a threshold that names none of its checks, and a rollback
    that is not allowed or would change nothing.
    """
    changes = config.health.rules
    known = {rule.name for rule in DEFAULT_RULES}
    for name in changes:
        if name not in known:
            raise ConfigError(
                f"unknown health rule 'ppo.health.rules.{name}'; {nearest(name, known)}"
            )
    kept = [
        _changed(rule, changes[rule.name]) if rule.name in changes else rule
        for rule in DEFAULT_RULES
        if rule.name not in changes or changes[rule.name].action != "ignore"
    ]
    for rule in kept:
        if rule.action == "rollback":
            _require_effect(rule, config)
    return tuple(kept)


def _changed(rule: Rule, change: RuleChange) -> Rule:
    checks = rule.checks
    if change.threshold is not None:
        checks = _with_thresholds(rule, change.threshold)
    if change.window is not None:
        checks = tuple(replace(check, window=change.window) for check in checks)
    given: dict[str, Any] = {
        "action": change.action,
        "after": change.after,
        "adjust": change.adjust and change.adjust.factors(),
    }
    return replace(
        rule, checks=checks, **{name: value for name, value in given.items() if value is not None}
    )


def _with_thresholds(rule: Rule, threshold: float | Mapping[str, float]) -> tuple[Check, ...]:
    path = f"ppo.health.rules.{rule.name}.threshold"
    metrics = [check.metric for check in rule.checks]
    # Each check with a threshold by its metric, or METRIC of WHAT where that occurs twice.
    names = {
        check.metric
        if metrics.count(check.metric) == 1
        else f"{check.metric} of {check.of}": position
        for position, check in enumerate(rule.checks)
        if check.op != "not_finite"
    }
    if not names:
        raise ConfigError(f"{path}: the rule asks whether a number is finite and has no threshold")
    if not isinstance(threshold, Mapping):
        if len(names) > 1:
            example = ", ".join(f"{name}: …" for name in names)
            raise ConfigError(
                f"{path}: the rule has {len(names)} checks; write it as {{{example}}}"
            )
        threshold = dict.fromkeys(names, threshold)
    checks = list(rule.checks)
    for name, bound in threshold.items():
        if name not in names:
            raise ConfigError(f"{path}: the rule has no check '{name}'; {nearest(name, names)}")
        checks[names[name]] = replace(checks[names[name]], bound=bound)
    return tuple(checks)


def _require_effect(rule: Rule, config: PpoConfig) -> None:
    path = f"ppo.health.rules.{rule.name}"
    if config.health.max_rollbacks == 0:
        raise ConfigError(
            f"{path}: action rollback with ppo.health.max_rollbacks 0 could only pause; use action pause"
        )
    if not any(name != "kl_coefficient" or config.kl.coefficient > 0 for name, _ in rule.adjust):
        nothing = "the rule names nothing that a rollback changes"
        reason = "it multiplies a KL coefficient of 0" if rule.adjust else nothing
        raise ConfigError(
            f"{path}: a rollback that changes no setting would only repeat what failed ({reason}); "
            "set its adjust, such as {lr: 0.5}, or use action pause"
        )


PARAMS_FILE = "params.yaml"
Model = TypeVar("Model", bound=Strict)


class Params(Strict):
    """The whole of params.yaml.

    Attributes:
        profile: Name of the profile that it was made with; it labels runs and changes nothing.
        seed: Of all random streams; a section may have its own.
        collect: Where the raw data come from.
        validate: What a row must satisfy, and how rows are split.
        base: The starting model.
        sft: Supervised fine-tuning.
        reward: The reward model.
        referee: The second reward model, on disjoint data: the policy is selected by it, never
            trained on it.
        judge: The third reward model, on disjoint data: it judges the result; nothing is trained or
            selected by it.
        gates: Conditions that must hold before later stages run.
        policy: How the policy is trained.
        critic: Critic pre-training, whose rewards and advantages are PPO's.
        ppo: PPO.
        evaluate: The policy against SFT on held-out prompts.
        report: The report.
        compute: Processes, threads and number formats.
        plan: What a memory plan cannot know by itself.
        checkpoints: Where partial state goes.
        pools: By stage, the work pool that it runs on, or a mapping with what its job asks for
            there; null for none.
        work_pools: By work pool, its settings on the Prefect server.
        registry: Registered models and their promotion.
        tracking: MLflow.
        flow: How a pipeline's stages are run and retried.
    """

    profile: str = ""
    seed: int = Field(default=1, ge=0, lt=2**63)
    collect: CollectConfig = CollectConfig()
    validate_: ValidateConfig = Field(default=ValidateConfig(), alias="validate")
    base: BaseConfig = BaseConfig()
    sft: SftConfig = SftConfig()
    reward: RewardConfig = RewardConfig()
    referee: RefereeConfig = RefereeConfig()
    judge: JudgeConfig = JudgeConfig()
    gates: GatesConfig = GatesConfig()
    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    ppo: PpoConfig = PpoConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    report: ReportConfig = ReportConfig()
    compute: ComputeConfig = ComputeConfig()
    plan: PlanConfig = PlanConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    pools: Pools = {}
    work_pools: dict[str, WorkPoolConfig] = {}
    registry: RegistryConfig = RegistryConfig()
    tracking: TrackingConfig = TrackingConfig()
    flow: FlowConfig = FlowConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Params:
        """What no section can tell alone. The rules are looked at here and not in PPO's own model,
        because critic pre-training reads that model too, and a changed rule must not run it
        again."""
        try:
            rules_for(self.ppo)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.ppo.min_new_tokens >= self.evaluate.max_new_tokens:
            raise ValueError(
                f"evaluate.max_new_tokens {self.evaluate.max_new_tokens} is not above ppo.min_new_tokens "
                f"{self.ppo.min_new_tokens}: no reply of the evaluation could end; raise the one or lower the other"
            )
        refuse_high_learning_rates(self)
        if not self.collect.pairs:
            self._functions_reward_and_judge()
        if self.ppo.critic_mode == "shared":
            self._critic_is_a_head()
        self._gated_metrics_are_measured()
        if not self.collect.pairs and self.gates.mode == "enforce":
            self._held_out_prompts_decide()
        self._gated_probes_can_be_formed()
        if self.ppo.share_base:
            self._base_can_be_shared()
        self._launch_fits()
        self._pools_fit()
        return self

    def _functions_reward_and_judge(self) -> None:
        """Without pairs nothing may ask for a model that is trained on them."""
        ppo, needs = self.ppo, "collect.pairs is false"
        wrong = [
            source.kind for source in ppo.reward.sources if not isinstance(source, FunctionSource)
        ]
        if wrong:
            raise ValueError(
                f"{needs}, so that functions alone reward, but ppo.reward.sources has one of kind {wrong[0]}: name "
                "functions, such as {kind: function, target: 'checks:score'}"
            )
        if self.policy.method != "ppo":
            raise ValueError(
                f"{needs}, but policy.method {self.policy.method} learns from models of pairs: set ppo"
            )
        if ppo.selection.method == "referee":
            raise ValueError(
                f"{needs}, so there is no referee that selects a checkpoint: set ppo.selection.method last"
            )
        if ppo.share_base:
            raise ValueError(
                f"{needs}, so there are no reward models to share a base with: set ppo.share_base false"
            )
        if (
            not ppo.advantage.critic_free
            and ppo.critic_mode != "shared"
            and self.critic.init == "reward"
        ):
            raise ValueError(
                f"{needs}, so there is no reward model for the critic to start from: set critic.init sft, or "
                "ppo.advantage.estimator grpo or rloo, which need no critic"
            )
        files = self.collect.files
        texts = {
            "demonstrations": files.demonstrations,
            "pretrain": files.pretrain or files.demonstrations,
        }
        if ppo.ptx.weight and not any(
            texts[kind] for kind in (texts if ppo.ptx.data == "both" else [ppo.ptx.data])
        ):
            raise ValueError(
                f"ppo.ptx.weight is {ppo.ptx.weight:g}, but collect.files names no texts for it: set it to 0, or give "
                f"{ppo.ptx.data if ppo.ptx.data != 'both' else 'demonstrations'}"
            )
        if self.evaluate.best_of_n:
            raise ValueError(
                f"{needs}, so there is no reward model that chooses a best reply: set evaluate.best_of_n 0"
            )

    def _held_out_prompts_decide(self) -> None:
        asked = {
            part
            for condition in self.gates.policy
            for metric in condition.metrics
            for part in metric.split(".")
        }
        if CHECKER not in asked:
            raise ValueError(
                "gates.policy asks nothing of comparison.checker, so a policy would pass by its reward on training "
                "prompts: add a condition such as {metric: comparison.checker.win_rate_low95, at_least: 0.5, why: …}"
            )

    @property
    def left_out(self) -> tuple[str, ...]:
        """The stages that the workspace does without: all that pairs are for, where there are
        none.
        """
        if self.collect.pairs:
            return ()
        of_sft = () if self.collect.files.demonstrations else ("gate-sft",)
        return (*of_sft, "reward", "referee", "judge", "gate-reward")

    def _base_can_be_shared(self) -> None:
        policy = self.ppo.policy_lora
        for name, scalar in (("reward", self.reward), ("referee", self.referee)):
            if policy is None or scalar.lora is None or scalar.init != "sft":
                raise ValueError(
                    "ppo.share_base needs policy, reward model and referee as adapters on the SFT model: set "
                    f"ppo.policy_lora, {name}.lora and {name}.init sft, or ppo.share_base false"
                )
            if scalar.lora.quantize != policy.quantize:
                raise ValueError(
                    f"ppo.share_base: {name}.lora.quantize is {scalar.lora.quantize}, but ppo.policy_lora.quantize is "
                    f"{policy.quantize}: on weights that are rounded otherwise it would not score as it was trained; "
                    "set both alike"
                )
        launch = self.compute.launch.get("ppo", LaunchConfig())
        if launch.frozen != "device" or launch.zero == 3 or launch.deepspeed is not None:
            raise ValueError(
                "ppo.share_base keeps one copy of the weights on every rank: leave compute.launch.ppo.frozen at device "
                "and zero below 3, without a DeepSpeed file, or set ppo.share_base false"
            )
        if self.ppo.advantage.critic_free or self.critic.lora is None or policy is None:
            return
        if self.ppo.critic_lora is not None:
            raise ValueError(
                "ppo.critic_lora with ppo.share_base and critic.lora: the critic goes on with the adapters that it was "
                "pre-trained as; set ppo.critic_lora to null"
            )
        # On the reward model it is pre-trained on weights into which that one's adapters were
        # merged, as they are.
        wanted = policy.quantize if self.critic.init == "sft" else None
        if self.critic.lora.quantize != wanted:
            raise ValueError(
                f"critic.lora.quantize is {self.critic.lora.quantize}, but with ppo.share_base and critic.init "
                f"{self.critic.init} it must be {wanted}: else its values would be those of other weights"
            )

    def _gated_metrics_are_measured(self) -> None:
        evaluate, world = self.evaluate, self.collect.source == "world"
        for number, condition in enumerate(self.gates.policy):
            parts = {part for metric in condition.metrics for part in metric.split(".")}
            first = {part for metric in condition.metrics for part in metric.split(".")[:2]}
            asked = f"gates.policy[{number}] asks for {condition.metric}"
            own = world and LOSSES in parts and "refusal_log_odds" not in parts
            absent = parts & {"reward", "referee", "judge", "perplexity_preferred"}
            if absent and not self.collect.pairs:
                raise ValueError(
                    f"{asked}, but collect.pairs is false, so there is no {sorted(absent)[0]}: take the condition out, "
                    "or start from the profile checker"
                )
            if CHECKER in parts and self.collect.pairs:
                raise ValueError(
                    f"{asked}, but reward functions judge only where collect.pairs is false: take the condition out"
                )
            if "gold" in parts and not world:
                raise ValueError(
                    f"{asked}, but collect.source is files, and only the synthetic world has a gold judge: take the "
                    "condition out, or start from the profile own-data"
                )
            if "safety" in parts and not own and (world or not evaluate.safety.prompts):
                why, instead = "is 0", ", or set evaluate.safety.prompts"
                if evaluate.safety.prompts:
                    why, instead = "are not asked in the synthetic world, which has its own", ""
                raise ValueError(
                    f"{asked}, but evaluate.safety.prompts {why}: take the condition out{instead}"
                )
            if (
                parts & {"perplexity_preferred", "perplexity_pretrain"}
                and not evaluate.perplexity.rows
            ):
                raise ValueError(
                    f"{asked}, but evaluate.perplexity.rows is 0: take the condition out, or set "
                    "evaluate.perplexity.rows"
                )
            if "kl_full" in parts and not self.ppo.kl.measures_full:
                raise ValueError(
                    f"{asked}, which is not measured: set ppo.kl.measure_full to true, or take the condition out"
                )
            for name in ("verifiable", "multiple_choice", "opponents"):
                if name in first and not getattr(evaluate, name):
                    raise ValueError(
                        f"{asked}, but evaluate.{name} is not set: take the condition out, or set evaluate.{name}"
                    )

    def _gated_probes_can_be_formed(self) -> None:
        if self.gates.reward is None and self.collect.pairs:
            raise ValueError(
                "gates.reward is null, but collect.pairs is true: give the reward model its conditions"
            )
        for number, condition in enumerate(self.gates.reward or ()):
            for kind in condition.probes:
                asked = f"gates.reward[{number}] asks for {condition.metric}"
                if kind not in (*PROBES, *WORLD_PROBES):
                    raise ValueError(
                        f"{asked}, but there is no such probe; {nearest(kind, (*PROBES, *WORLD_PROBES))}"
                    )
                if kind in WORLD_PROBES and self.collect.source != "world":
                    raise ValueError(
                        f"{asked}, but collect.source is files, and only questions of the synthetic world have right "
                        f"and wrong answers that are known: ask for one of {', '.join(PROBES)}, or start from the "
                        "profile own-data"
                    )

    def _critic_is_a_head(self) -> None:
        if "init" in self.critic.model_fields_set and self.critic.init != "sft":
            raise ValueError(
                f"critic.init {self.critic.init} with ppo.critic_mode shared: the value head sits on the policy, which "
                "starts as the SFT model; leave critic.init out, or use ppo.critic_mode separate"
            )
        if self.critic.lora is not None:
            raise ValueError(
                "critic.lora with ppo.critic_mode shared: only the value head is pre-trained, on the frozen SFT model, "
                "so adapters would go untrained; leave critic.lora out, or use ppo.critic_mode separate"
            )

    def _launch_fits(self) -> None:
        launch = self.compute.launch.get("ppo", LaunchConfig())
        if launch.engine == "deepspeed" and self.ppo.critic_mode == "shared":
            raise ValueError(
                "ppo.critic_mode shared trains policy and value head in one pass, which engine local alone is known to "
                "do on several ranks: launch ppo with engine local, or use ppo.critic_mode separate"
            )
        if launch.engine == "deepspeed" and self.ppo.gradient_norm == "joint":
            raise ValueError(
                "ppo.gradient_norm joint needs the norms of two models before either steps, which engine deepspeed "
                "does not tell: use separate, or launch ppo with engine local"
            )
        exact = (
            self.ppo.kl.placement == "loss"
            and self.ppo.kl.estimator == "full"
            and self.ppo.kl.coefficient > 0
        )
        if launch.frozen == "offload" and exact:
            raise ValueError(
                "ppo.kl.estimator full in the loss runs the reference in every update: it cannot wait in CPU memory, "
                "so set compute.launch.ppo.frozen to device or sharded"
            )
        evaluation = self.compute.launch.get("evaluate", LaunchConfig())
        if evaluation.frozen == "sharded" and self.evaluate.sampler.kind == "local":
            raise ValueError(
                "compute.launch.evaluate.frozen sharded leaves no rank a whole model to sample with: let a server "
                "sample (evaluate.sampler.kind vllm), or set frozen to device"
            )
        # Small updates of bfloat16 weights round to nothing unless float32 masters take them
        # (docs/engines.md).
        for stage, launch in self.compute.launch.items():
            if self.base.dtype != "float32" and launch.engine == "deepspeed" and launch.zero == 0:
                raise ValueError(
                    f"compute.launch.{stage}.zero 0 keeps no float32 master weights of a base.dtype {self.base.dtype} "
                    "model, whose small updates would round to nothing: use zero 1, 2 or 3, or engine local"
                )

    def _pools_fit(self) -> None:
        """A job of a pool has a GPU for each process of its stage, and a machine or a Slurm job of
        several.
        """
        launches = {str(stage): launch for stage, launch in self.compute.launch.items()}
        shared = {job.pool: job.shared for job in self.pools.values()}
        for stage, job in self.pools.items():
            if job.shared != shared[job.pool]:
                raise ValueError(
                    f"pools.{stage}.shared is {str(job.shared).lower()}, but another stage says the opposite of the "
                    f"pool {job.pool}: its workers see the workspace or they do not, so say the same of both"
                )
            launch = launches.get(stage, LaunchConfig())
            if launch.nodes != (job.nodes or 1):
                raise ValueError(
                    f"compute.launch.{stage}.nodes is {launch.nodes}, but pools.{stage}.nodes is {job.nodes or 1} "
                    f"machine(s); set both to the same number, or take {stage} out of pools and start it as "
                    "docs/operations.md says"
                )
            if job.gpus and job.gpus != launch.processes:
                raise ValueError(
                    f"pools.{stage}.gpus is {job.gpus}, but the stage runs as {launch.processes} process(es), one "
                    "GPU each (compute.launch); set both to the same number"
                )
        for stage, launch in launches.items():
            if launch.nodes > 1 and launch.rendezvous is None and stage not in self.pools:
                raise ValueError(
                    f"compute.launch.{stage}.nodes above 1 meet somewhere: set rendezvous to host:port of one of "
                    f"them, or let a Slurm job start them (pools.{stage}.nodes)"
                )

    @property
    def later_adapters(self) -> dict[str, LoraConfig]:
        """Those that a stage after SFT trains, by its section."""
        needs_critic = self.policy.method == "ppo" and not self.ppo.advantage.critic_free
        names = ("reward", "referee", "judge", *(("critic",) if needs_critic else ()))
        return {name: lora for name in names if (lora := getattr(self, name).lora) is not None}

    def pool_names(self) -> list[str]:
        """The work pools that stages run on, each once."""
        return sorted({placement.pool for placement in self.pools.values()})

    def pools_away(self) -> list[str]:
        """Those of the work pools whose workers do not see the workspace."""
        return sorted({placement.pool for placement in self.pools.values() if not placement.shared})

    def pool_limit(self, pool: str) -> int:
        """How many jobs a pool that is made or served from here takes at a time: one unless
        ``work_pools`` says.
        """
        return self.work_pools.get(pool, WorkPoolConfig()).limit or 1


def check_params(document: Any, name: str = PARAMS_FILE) -> Params:
    """``document`` as :class:`Params`; ``ConfigError`` with one line per problem, each with its
    path.
    """
    plain = yaml_text.plain(document)
    try:
        return Params.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(describe(name, error, Params, "")) from error


def load_params(workspace: Path) -> Params:
    """The checked params.yaml of a workspace."""
    return check_params(yaml_text.read(workspace / PARAMS_FILE), str(workspace / PARAMS_FILE))


def load_section(
    workspace: Path, section: str, model: type[Model], beside: Sequence[str] = ()
) -> Model:
    """One section as ``model``, with the seed from the top of the file.

    Args:
        workspace: The folder with params.yaml.
        section: Name of the section.
        model: What checks it.
        beside: Other sections that ``model`` has as fields, such as ``ppo`` for the critic's stage.
    """
    document = yaml_text.plain(yaml_text.read(workspace / PARAMS_FILE))
    values = dict(document.get(section) or {})
    seed = document.get("seed", 1)
    if issubclass(model, StageConfig):
        values.setdefault("seed", seed)
    values |= {name: document[name] for name in beside if name in document}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(str(workspace / PARAMS_FILE), error, model, section)) from error


DEFAULT_PROFILE = "demo"
# What the stages of a workspace write.
OWN_MODELS = {
    f"models/{name}" for name in ("base", "sft", "reward", "referee", "judge", "critic", "policy")
}
ANNOTATIONS, OWN_ANNOTATIONS = "collect.annotations", "data/annotations/"
# Settings whose relative paths start at the workspace, `*` for any key or entry: of files, and of
# what may be a hub id, or a command.
FILES = (
    ANNOTATIONS, "collect.files.*.*.path", "validate.evaluation_files.*.path", "evaluate.verifiable.path",
    "evaluate.multiple_choice.files.*", "evaluate.multiple_choice.few_shot_files.*", "evaluate.opponents.*.path",
    "compute.launch.*.deepspeed", "registry.signature.public_key", "registry.signature.earlier_public_keys.*",
    "registry.signature.certificates.*",
    "ppo.sampler.weights_folder", "evaluate.sampler.weights_folder", "checkpoints.store",
)  # fmt: skip
STARTING_MODEL, TOKENIZER = "base.source", "validate.tokenizer"
MODELS = (
    STARTING_MODEL, TOKENIZER, "ppo.reward.sources.*.path", "ppo.reward.sources.*.model",
    "ppo.reward.sources.*.paths.*", "ppo.sampler.python", "evaluate.sampler.python",
)  # fmt: skip


def profiles(folder: Path) -> dict[str, Path]:
    """Profile names and files; ``demo`` is the base file itself when it has no overlay of its
    own.
    """
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def profile_names(profile: str | None) -> list[str]:
    """The profiles of ``own-data,8x80gb``, none where ``profile`` is None."""
    return [name.strip() for name in profile.split(",")] if profile else []


def profile_text(folder: Path, name: str, below: tuple[str, ...] = ()) -> str:
    """The overlay of profile ``name``, laid over that of the profile which its line
    ``extends: OTHER`` names.

    Args:
        below: The profiles that extend this one.

    Raises:
        ConfigError: There is no such profile (the nearest name is given), or one extends itself.
    """
    known = profiles(folder)
    if name not in known:
        raise ConfigError(f"no profile '{name}'; {nearest(name, known)}")
    if name in below:
        raise ConfigError(
            f"profile '{name}' extends itself, by {', '.join(below)}; take one line 'extends' out"
        )
    text = known[name].read_text(encoding="utf-8")
    document = yaml_text.parse(text, f"profile {name}")
    if "extends" not in document:
        return text
    extended = profile_text(folder, str(document.pop("extends")), (*below, name))
    return overlaid(extended, [(f"profile {name}", yaml_text.dump(document))])


def merge(base: str, overlays: Sequence[tuple[str, str]] = (), sets: Sequence[str] = ()) -> str:
    """:func:`overlaid`, checked as a whole: ``ConfigError`` names the first path that is unknown or
    wrong.
    """
    text = overlaid(base, overlays, sets)
    check_params(yaml_text.parse(text, "params.yaml"), "parameters")
    return text


def overlaid(base: str, overlays: Sequence[tuple[str, str]] = (), sets: Sequence[str] = ()) -> str:
    """``base`` with each ``(name, text)`` overlay and then each ``section.key=value`` applied in
    order, unchecked.

    Returns YAML text with the comments of ``base``.
    """
    document = yaml_text.parse(base, "params.yaml")
    for name, text in overlays:
        overlay = yaml_text.parse(text, name)
        _merge_into(document, overlay)
    for assignment in sets:
        _put(document, *parse_assignment(assignment))
    return yaml_text.dump(document)


def overlays_of(
    base: str, folder: Path, profile: str | None, sets: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """The overlays for :func:`merge`: the profile, and ``pretrained`` beneath it where ``sets``
    choose such a model.

    A base that trains a pretrained model already, or a profile that chooses one, has settings of
    its own.

    Args:
        base: Text of the params.yaml that is changed.
        folder: The profiles.
        profile: Name of the profile, or several, as in ``own-data,8x80gb``, a later one over those
            before it.
        sets: ``section.key=value`` overrides.
    """
    overlays = [(f"profile {name}", profile_text(folder, name)) for name in profile_names(profile)]
    chosen = [value for path, value in map(parse_assignment, sets) if path == "base.source"]
    documents = [
        yaml_text.parse(base, "params.yaml"),
        *(yaml_text.parse(text, name) for name, text in overlays),
    ]
    sources = [str((document.get("base") or {}).get("source", SCRATCH)) for document in documents]
    if chosen and is_pretrained(str(chosen[-1])) and not any(map(is_pretrained, sources)):
        overlays.insert(0, (f"profile {PROFILE}", profile_text(folder, PROFILE)))
    return overlays


def parse_assignment(assignment: str) -> tuple[str, Any]:
    """Path and value of ``section.key=value``; ``ConfigError`` when it is not one."""
    path, separator, value = assignment.partition("=")
    if not separator or not path.strip():
        raise ConfigError(
            f"--set {assignment}: write it as section.key=value, such as --set ppo.iterations=20"
        )
    text = value.strip()
    if " #" in f" {text}" and text[0] not in "\"'[{|>":
        return path.strip(), text  # a command line has no comments
    return path.strip(), yaml_text.parse_scalar(value)


def overridden(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter document with ``{"section.key": value}`` applied. Nothing is checked
    here.
    """
    changed = copy.deepcopy(dict(document))
    for path, value in changes.items():
        _put(changed, path, copy.deepcopy(value))
    return changed


def rebase_sources(text: str, origin: Path, target: Path) -> str:
    """``text``, written for ``origin``, with the relative paths of FILES and MODELS made right for
    ``target``.

    A workspace's own ``data/annotations/`` stay its own, and so do its own models but for the
    starting model and the tokenizer: those come before any model of its own.
    """
    document = yaml_text.parse(text, "params.yaml")
    for setting in FILES:
        for entries, key in _texts_at(document, setting.split(".")):
            if not (setting == ANNOTATIONS and entries[key].startswith(OWN_ANNOTATIONS)):
                entries[key] = _rebase_file(entries[key], origin, target)
    for setting in MODELS:
        for entries, key in _texts_at(document, setting.split(".")):
            folder = "/".join(entries[key].split("/")[:2])
            is_own = setting not in (STARTING_MODEL, TOKENIZER) and folder in OWN_MODELS
            if is_pretrained(entries[key]) and not is_own:
                entries[key] = _rebase_model(entries[key], origin, target)
    return yaml_text.dump(document)


def _texts_at(node: Any, keys: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Each text at a dotted setting, with what holds it and its key there; a source may be a text
    or have a path.
    """
    head, *rest = keys
    if not isinstance(node, dict | list):
        return
    held = dict(enumerate(node)) if isinstance(node, list) else dict(node)
    for key in held if head == "*" else [head]:
        value = held.get(key)
        if isinstance(value, str) and rest in ([], ["path"]):
            yield node, key
        elif rest:
            yield from _texts_at(value, rest)


def _rebase_file(path: str, origin: Path, target: Path) -> str:
    """A relative path or glob, seen from ``target``; hub ids, URLs and absolute paths stay."""
    if path.startswith(("hub:", "~")) or is_url(path) or os.path.isabs(path):
        return path
    return os.path.relpath(origin / path, target)


def _rebase_model(path: str, origin: Path, target: Path) -> str:
    """A folder or file that exists at ``origin``, seen from ``target``; anything else may be a hub
    id and stays.
    """
    if path.startswith("~") or os.path.isabs(path) or not (origin / path).exists():
        return path
    moved = os.path.relpath(origin / path, target)
    # A path, not a hub id or a model of the workspace's own.
    return moved if moved.startswith("..") or moved == path else f"./{moved}"


def workspace_name(profile: str, sets: Sequence[str]) -> str:
    """Folder name of the workspace of a profile and its overrides: the same for the same, whatever
    their order.
    """
    name = "-".join(profile_names(profile))
    if not sets:
        return name
    digest = hashlib.sha256("\n".join(sorted(sets)).encode()).hexdigest()[:8]
    return f"{name}-{digest}"


def _merge_into(target: Any, overlay: Any) -> None:
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge_into(target[key], value)
        else:
            target[key] = value


def _put(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    parent = document
    for part in parents:
        if not isinstance(parent.get(part), dict):
            parent[part] = {}
        parent = parent[part]
    parent[last] = value

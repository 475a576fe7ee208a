"""params.yaml as checked models: the whole file at once, or one stage's section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.pretrained import learning_rates, refuse_high_learning_rates
from rlhf_core.config.loading.rule_changes import rules_for
from rlhf_core.config.lora import LoraConfig
from rlhf_core.config.model import StageConfig, Strict
from rlhf_core.config.operations.launch import LaunchConfig
from rlhf_core.config.operations.operations import (
    CheckpointsConfig,
    ComputeConfig,
    FlowConfig,
    RegistryConfig,
    TrackingConfig,
)
from rlhf_core.config.operations.placement import PlacementOrPool, WorkPoolConfig
from rlhf_core.config.operations.plan import PlanConfig
from rlhf_core.config.problems import describe
from rlhf_core.config.stages.base import BaseConfig
from rlhf_core.config.stages.collect import CollectConfig
from rlhf_core.config.stages.critic import CriticConfig
from rlhf_core.config.stages.evaluate import EvaluateConfig
from rlhf_core.config.stages.gates import LOSSES, GatesConfig
from rlhf_core.config.stages.policy import PolicyConfig
from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.config.stages.report import ReportConfig
from rlhf_core.config.stages.reward import JudgeConfig, RefereeConfig, RewardConfig
from rlhf_core.config.stages.sft import SftConfig
from rlhf_core.config.stages.validate import ValidateConfig
from rlhf_core.errors import ConfigError

PARAMS_FILE = "params.yaml"
Model = TypeVar("Model", bound=Strict)


class Params(Strict):
    """The whole of params.yaml. ``profile`` is the name of the profile that it was made with; it labels runs."""

    profile: str = ""
    seed: int = Field(default=1, ge=0)
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
    pools: dict[str, PlacementOrPool] = {}
    work_pools: dict[str, WorkPoolConfig] = {}
    registry: RegistryConfig = RegistryConfig()
    tracking: TrackingConfig = TrackingConfig()
    flow: FlowConfig = FlowConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Params:
        """What no section can tell alone. The rules are looked at here and not in PPO's own model, because critic
        pre-training reads that model too, and a changed rule must not run it again."""
        try:
            rules_for(self.ppo)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.ppo.min_new_tokens >= self.evaluate.max_new_tokens:
            raise ValueError(
                f"evaluate.max_new_tokens {self.evaluate.max_new_tokens} is not above ppo.min_new_tokens "
                f"{self.ppo.min_new_tokens}: no reply of the evaluation could end; raise the one or lower the other"
            )
        rates = learning_rates(self.sft, self.reward, self.referee, self.judge, self.critic, self.ppo, self.policy)
        refuse_high_learning_rates(self.base, rates)
        if self.ppo.critic_mode == "shared":
            self._critic_is_a_head()
        if self.collect.source == "files":
            self._no_gold()
        self._gated_metrics_are_measured()
        if self.ppo.share_base:
            self._base_can_be_shared()
        return self

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
        if not self.ppo.advantage.critic_free:
            self._critic_can_share(policy)
        launch = self.compute.launch.get("ppo", LaunchConfig())
        if launch.frozen != "device" or launch.zero == 3 or launch.deepspeed is not None:
            raise ValueError(
                "ppo.share_base keeps one copy of the weights on every rank: leave compute.launch.ppo.frozen at device "
                "and zero below 3, without a DeepSpeed file, or set ppo.share_base false"
            )

    def _critic_can_share(self, policy: LoraConfig | None) -> None:
        if self.critic.lora is None or policy is None:
            return
        if self.ppo.critic_lora is not None:
            raise ValueError(
                "ppo.critic_lora with ppo.share_base and critic.lora: the critic goes on with the adapters that it was "
                "pre-trained as; set ppo.critic_lora to null"
            )
        # On the reward model it is pre-trained on weights into which that one's adapters were merged, as they are.
        wanted = policy.quantize if self.critic.init == "sft" else None
        if self.critic.lora.quantize != wanted:
            raise ValueError(
                f"critic.lora.quantize is {self.critic.lora.quantize}, but with ppo.share_base and critic.init "
                f"{self.critic.init} it must be {wanted}: else its values would be those of other weights"
            )

    def _no_gold(self) -> None:
        for number, condition in enumerate(self.gates.policy):
            if any("gold" in metric.split(".") for metric in condition.metrics):
                raise ValueError(
                    f"gates.policy[{number}] asks for {condition.metric}, but collect.source is files, and only the "
                    "synthetic world has a gold judge: take the condition out, or start from the profile own-data"
                )

    def _gated_metrics_are_measured(self) -> None:
        safety, perplexity = self.evaluate.safety.prompts, self.evaluate.perplexity.rows
        for number, condition in enumerate(self.gates.policy):
            parts = {part for metric in condition.metrics for part in metric.split(".")}
            own = self.collect.source == "world" and LOSSES in parts and "refusal_log_odds" not in parts
            if "safety" in parts and not own and (self.collect.source == "world" or not safety):
                why = "is 0" if not safety else "are not asked in the synthetic world, which has its own"
                raise ValueError(
                    f"gates.policy[{number}] asks for {condition.metric}, but evaluate.safety.prompts {why}: take the "
                    "condition out" + ("" if safety else ", or set evaluate.safety.prompts")
                )
            if parts & {"perplexity_preferred", "perplexity_pretrain"} and not perplexity:
                raise ValueError(
                    f"gates.policy[{number}] asks for {condition.metric}, but evaluate.perplexity.rows is 0: take the "
                    "condition out, or set evaluate.perplexity.rows"
                )
            if "kl_full" in parts and not self.ppo.kl.measures_full:
                raise ValueError(
                    f"gates.policy[{number}] asks for {condition.metric}, which is not measured: set "
                    "ppo.kl.measure_full to true, or take the condition out"
                )
            measured_by = {part for metric in condition.metrics for part in metric.split(".")[:2]}
            for name, given in (
                ("verifiable", self.evaluate.verifiable),
                ("multiple_choice", self.evaluate.multiple_choice),
                ("opponents", self.evaluate.opponents),
            ):
                if name in measured_by and not given:
                    raise ValueError(
                        f"gates.policy[{number}] asks for {condition.metric}, but evaluate.{name} is not set: take the "
                        f"condition out, or set evaluate.{name}"
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

    @model_validator(mode="after")
    def _launch_fits(self) -> Params:
        launch = self.compute.launch.get("ppo")
        if launch is None:
            return self
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
        exact = self.ppo.kl.placement == "loss" and self.ppo.kl.estimator == "full" and self.ppo.kl.coefficient > 0
        if launch.frozen == "offload" and exact:
            raise ValueError(
                "ppo.kl.estimator full in the loss runs the reference in every update: it cannot wait in CPU memory, "
                "so set compute.launch.ppo.frozen to device or sharded"
            )
        return self

    @model_validator(mode="after")
    def _updates_do_not_vanish(self) -> Params:
        """Small updates of bfloat16 weights round to nothing unless float32 masters take them (docs/engines.md)."""
        for stage, launch in self.compute.launch.items():
            if self.base.dtype != "float32" and launch.engine == "deepspeed" and launch.zero == 0:
                raise ValueError(
                    f"compute.launch.{stage}.zero 0 keeps no float32 master weights of a base.dtype {self.base.dtype} "
                    "model, whose small updates would round to nothing: use zero 1, 2 or 3, or engine local"
                )
        return self

    @model_validator(mode="after")
    def _pools_fit(self) -> Params:
        """A job of a pool is one machine, whose GPUs are one for each process of the stage."""
        launches = {str(stage): launch for stage, launch in self.compute.launch.items()}
        shared = {job.pool: job.shared for job in self.pools.values()}
        for stage, job in self.pools.items():
            if job.shared != shared[job.pool]:
                raise ValueError(
                    f"pools.{stage}.shared is {str(job.shared).lower()}, but another stage says the opposite of the "
                    f"pool {job.pool}: its workers see the workspace or they do not, so say the same of both"
                )
            launch = launches.get(stage, LaunchConfig())
            if launch.nodes > 1:
                raise ValueError(
                    f"compute.launch.{stage}.nodes is {launch.nodes}, but a job of the pool {job.pool} is one "
                    f"machine; set nodes to 1, or take {stage} out of pools and start it as docs/operations.md says"
                )
            if job.gpus and job.gpus != launch.processes:
                raise ValueError(
                    f"pools.{stage}.gpus is {job.gpus}, but the stage runs as {launch.processes} process(es), one "
                    "GPU each (compute.launch); set both to the same number"
                )
        return self

    def pool_names(self) -> list[str]:
        """The work pools that stages run on, each once."""
        return sorted({placement.pool for placement in self.pools.values()})

    def pools_away(self) -> list[str]:
        """Those of the work pools whose workers do not see the workspace."""
        return sorted({placement.pool for placement in self.pools.values() if not placement.shared})

    def pool_limit(self, pool: str) -> int:
        """How many jobs a pool that is made or served from here takes at a time: one unless ``work_pools`` says."""
        return self.work_pools.get(pool, WorkPoolConfig()).limit or 1


def check_params(document: Any, name: str = PARAMS_FILE) -> Params:
    """``document`` as :class:`Params`; ``ConfigError`` with one line per problem, each with its path."""
    plain = yaml_text.plain(document)
    try:
        return Params.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(describe(name, error, Params, "")) from error


def load_params(workspace: Path) -> Params:
    """The checked params.yaml of a workspace."""
    return check_params(yaml_text.read(workspace / PARAMS_FILE), str(workspace / PARAMS_FILE))


def load_section(workspace: Path, section: str, model: type[Model]) -> Model:
    """One section as ``model``, with the seed from the top of the file.

    A field of ``model`` named like another section (``ppo`` of the critic's stage) is filled from that section.
    """
    document = yaml_text.plain(yaml_text.read(workspace / PARAMS_FILE))
    values = dict(document.get(section) or {})
    seed = document.get("seed", 1)
    if issubclass(model, StageConfig):
        values.setdefault("seed", seed)
    for name in model.model_fields:
        if name != section and name in document and name in Params.model_fields and name != "seed":
            values.setdefault(name, document[name])
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(str(workspace / PARAMS_FILE), error, model, section)) from error

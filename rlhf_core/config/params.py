"""The whole of params.yaml, typed: its sections, and what is derived from several of them."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import BaseConfig, SftConfig
from rlhf_core.config.data import CollectConfig, ValidateConfig
from rlhf_core.config.evaluation import EvaluateConfig, ReportConfig
from rlhf_core.config.gates import GatesConfig
from rlhf_core.config.model import LoraConfig, Strict
from rlhf_core.config.operations import (
    CheckpointsConfig,
    ComputeConfig,
    FlowConfig,
    PlanConfig,
    Pools,
    RegistryConfig,
    TrackingConfig,
    WorkPoolConfig,
)
from rlhf_core.config.policy import CriticConfig, PolicyConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.reward import JudgeConfig, RefereeConfig, RewardConfig


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

    @property
    def left_out(self) -> tuple[str, ...]:
        """The stages that a workspace without pairs does not have."""
        if self.collect.pairs:
            return ()
        stages: tuple[str, ...] = ("reward", "referee", "judge", "gate-reward")
        if not self.collect.files.demonstrations:
            stages = ("gate-sft", *stages)
        return stages

    @property
    def later_adapters(self) -> dict[str, LoraConfig]:
        """The adapters that stages after SFT train beside the policy's, by section."""
        adapters = {
            "reward": self.reward.lora,
            "referee": self.referee.lora,
            "judge": self.judge.lora,
        }
        if self.policy.method == "ppo" and not self.ppo.advantage.critic_free:
            adapters["critic"] = self.critic.lora
        return {name: lora for name, lora in adapters.items() if lora is not None}

    def pool_names(self) -> list[str]:
        """The work pools that stages run on, each once."""
        return sorted({placement.pool for placement in self.pools.values()})

    def pools_away(self) -> list[str]:
        """The work pools whose workers do not see the workspace, each once."""
        return sorted({placement.pool for placement in self.pools.values() if not placement.shared})

    def pool_limit(self, pool: str) -> int:
        """How many jobs a pool takes at a time: one, unless ``work_pools`` says otherwise."""
        return self.work_pools.get(pool, WorkPoolConfig()).limit or 1

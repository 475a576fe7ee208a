"""RLHF with PPO-max: training, evaluation and gates, as stages of a pipeline or as plain functions.

The names in ``__all__`` are the public interface; docs/library.md shows them at work. They are
imported when they are first used, so that ``import rlhf_core`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.api.comparison import PolicyComparison as PolicyComparison
    from rlhf_core.api.comparison import compare_policies as compare_policies
    from rlhf_core.api.critic import TrainedCritic as TrainedCritic
    from rlhf_core.api.critic import train_critic as train_critic
    from rlhf_core.api.dpo import DpoPolicy as DpoPolicy
    from rlhf_core.api.dpo import train_dpo as train_dpo
    from rlhf_core.api.ppo import TrainedPolicy as TrainedPolicy
    from rlhf_core.api.ppo import train_ppo as train_ppo
    from rlhf_core.api.reward_model import TrainedRewardModel as TrainedRewardModel
    from rlhf_core.api.reward_model import train_reward_model as train_reward_model
    from rlhf_core.api.sft import SftRun as SftRun
    from rlhf_core.api.sft import train_sft as train_sft
    from rlhf_core.config.base import SftConfig as SftConfig
    from rlhf_core.config.health import HealthConfig as HealthConfig
    from rlhf_core.config.model import LoraConfig as LoraConfig
    from rlhf_core.config.model import OptimizerConfig as OptimizerConfig
    from rlhf_core.config.model import SamplingConfig as SamplingConfig
    from rlhf_core.config.policy import CriticConfig as CriticConfig
    from rlhf_core.config.policy import DpoConfig as DpoConfig
    from rlhf_core.config.ppo import PpoConfig as PpoConfig
    from rlhf_core.config.ppo import RolloutConfig as RolloutConfig
    from rlhf_core.config.ppo_losses import PtxConfig as PtxConfig
    from rlhf_core.config.reward import RewardConfig as RewardConfig
    from rlhf_core.errors import RlhfError as RlhfError
    from rlhf_core.errors import TrainingPaused as TrainingPaused
    from rlhf_core.models.causal_lm import load_policy as load_policy
    from rlhf_core.models.heads import ScalarModel as ScalarModel
    from rlhf_core.ppo.reward_sources.functions import FunctionReward as FunctionReward
    from rlhf_core.training.run_context import RunContext as RunContext

__version__ = "0.2.0"

_MODULES = {
    "CriticConfig": "config.policy",
    "DpoConfig": "config.policy",
    "DpoPolicy": "api.dpo",
    "FunctionReward": "ppo.reward_sources.functions",
    "HealthConfig": "config.health",
    "LoraConfig": "config.model",
    "OptimizerConfig": "config.model",
    "PolicyComparison": "api.comparison",
    "PpoConfig": "config.ppo",
    "PtxConfig": "config.ppo_losses",
    "RewardConfig": "config.reward",
    "RlhfError": "errors",
    "RolloutConfig": "config.ppo",
    "RunContext": "training.run_context",
    "SamplingConfig": "config.model",
    "ScalarModel": "models.heads",
    "SftConfig": "config.base",
    "SftRun": "api.sft",
    "TrainedCritic": "api.critic",
    "TrainedPolicy": "api.ppo",
    "TrainedRewardModel": "api.reward_model",
    "TrainingPaused": "errors",
    "compare_policies": "api.comparison",
    "load_policy": "models.causal_lm",
    "train_critic": "api.critic",
    "train_dpo": "api.dpo",
    "train_ppo": "api.ppo",
    "train_reward_model": "api.reward_model",
    "train_sft": "api.sft",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_core.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

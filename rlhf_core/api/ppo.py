"""PPO-max on a causal language model that is in memory, with a reward function."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.critic import TrainedCritic, evaluating
from rlhf_core.api.inputs import require_type, rows_of
from rlhf_core.api.ppo_inputs import PpoInputs
from rlhf_core.api.reward_function import RewardFunction, reward_fn_of
from rlhf_core.api.reward_model import TrainedRewardModel
from rlhf_core.api.run_folder import run_context
from rlhf_core.api.selection import CheckpointSelector, referee_selector
from rlhf_core.config.loading.rule_changes import rules_for
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.ppo.ptx import PtxConfig
from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.data.chat.encoding import decode_reply, pad_id
from rlhf_core.data.schema import Demonstration, Prompt
from rlhf_core.data.tokens.token_table import TokenTable
from rlhf_core.evaluation.selection import CheckpointChoice
from rlhf_core.models.adapters.lora import WithoutAdapters, add_adapters, merge_adapters
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.models.io import load_weights
from rlhf_core.models.starting.base import save_policy
from rlhf_core.ppo.callbacks.health import HealthCallback
from rlhf_core.ppo.callbacks.health_monitor import HealthMonitor
from rlhf_core.ppo.callbacks.selection import SelectionCallback
from rlhf_core.ppo.checkpoints.run_checkpoint import load_best
from rlhf_core.ppo.learners.actor_critic_pair import ActorCriticPair, separate_actor_critic
from rlhf_core.ppo.learners.policy_alone import policy_alone
from rlhf_core.ppo.losses.ptx import PtxData, PtxTexts
from rlhf_core.ppo.rewards.reward_normalization import RunningMeanStd
from rlhf_core.ppo.rewards.token_rewards import reward_model_fn
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.factory import opened_sampler
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext

DEFAULT_POLICY_LR, DEFAULT_CRITIC_LR = 1e-6, 5e-6


@dataclass(frozen=True)
class TrainedPolicy:
    """The policy of a finished PPO run.

    Attributes:
        model: The selected checkpoint where there was a referee, else the last one.
        tokenizer: Its tokenizer, which has a chat template.
        choice: The checkpoint that the referee selected, and why; None without a referee.
        findings: What the health rules found, oldest first.
        history: The metrics of each iteration.
        samples: Sampled prompts and replies of some iterations.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    choice: CheckpointChoice | None
    findings: list[dict[str, Any]]
    history: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    def save(self, path: str | Path) -> None:
        """Save model and tokenizer as a Hugging Face folder, after checking that the copy computes the same."""
        save_policy(Path(path), self.model, self.tokenizer)


def train_ppo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt | Mapping[str, Any] | str],
    reward: RewardFunction | ScalarModel | TrainedRewardModel,
    critic: TrainedCritic | None = None,
    *,
    referee: ScalarModel | TrainedRewardModel | None = None,
    validation_prompts: Iterable[Prompt | Mapping[str, Any] | str] = (),
    demonstrations: Iterable[Demonstration | Mapping[str, Any]] = (),
    config: PpoConfig | None = None,
    context: RunContext | None = None,
) -> TrainedPolicy:
    """Optimise a copy of ``model`` with PPO-max (algorithms.md §4–§7; paper, sections 5 and 6).

    The health rules watch the run; with ``config.health.mode: enforce`` they pause it or roll it back. A high reward
    does not show that the policy is better: give a ``referee``, or compare the result with ``model`` by other means.

    Args:
        model: The model to start from, which is the reference too. It is left as it is.
        tokenizer: Its tokenizer.
        prompts: Strings, or records such as ``{"prompt": ...}``; see docs/data-formats.md.
        reward: ``f(prompts, replies)`` with one number per reply, or a reward model of the same tokenizer.
        critic: The pre-trained critic, of which a copy is trained further; None with critic-free advantages
            (``config.advantage.estimator`` rloo or grpo).
        referee: A second reward model, not trained on what ``reward`` was trained on: it selects the checkpoint.
        validation_prompts: What the referee judges replies to; needed with a referee.
        demonstrations: Texts of the ptx loss; needed where ``config.ptx.weight`` is not 0.
        config: Settings; by default with learning rates of 1e-6 and 5e-6, and the ptx loss if there are texts.
        context: Where to report and to keep partial state; by default nowhere.

    Raises:
        ConfigError: Settings contradict each other, the critic or what was given.
        DataError: A prompt leaves no room for a reply, or the reward function breaks its contract.
        TrainingPaused: A health rule paused the run, or three steps in a row were not finite.
    """
    require_type(config, PpoConfig, "config")
    texts = rows_of(Demonstration, given, "demonstrations") if (given := list(demonstrations)) else []
    config = config or default_ppo_config(ptx=bool(texts))
    inputs = PpoInputs.checked(
        config, model, tokenizer, prompts, reward, critic, referee, list(validation_prompts), texts
    )
    seed_everything(config.seed)
    with evaluating(model), run_context(context, "train_ppo", *inputs.identity()) as run:
        ppo = assemble(inputs, run)
        with opened_sampler(config.sampler, run.work) as sampler:
            ppo.trainer.sampler = sampler
            ppo.trainer.run()
        trained, choice = ppo.trainer.learner.pair.release_policy(), None
        if ppo.selector is not None:
            choice = ppo.selector.choice()
            load_weights(trained, load_best(run.work / "best", choice.candidate.iteration))
        history, samples = ppo.trainer.history.rows(), ppo.trainer.samples.rows()
    if config.policy_lora is not None:
        merge_adapters(trained)
    return TrainedPolicy(trained.eval(), inputs.tokenizer, choice, ppo.health.findings, history, samples)


@dataclass(frozen=True)
class AssembledPpo:
    """A run ready to start: the trainer, and those of its parts that are read afterwards."""

    trainer: Trainer
    health: HealthCallback
    selector: CheckpointSelector | None


def assemble(inputs: PpoInputs, context: RunContext) -> AssembledPpo:
    """Build policy, reference and critic with their engines, and the callbacks; what was given is copied."""
    config, tokenizer = inputs.config, inputs.tokenizer
    policy, reference = _policy_and_reference(inputs.model, config)
    selector = None
    if inputs.referee is not None:
        proxy = inputs.reward if isinstance(inputs.reward, ScalarModel) else None
        prompts = inputs.validation_prompts
        selector = referee_selector(config, reference, tokenizer, prompts, inputs.referee.eval(), proxy)
    pair = _pair(inputs, policy, context)
    limits = {"kl": config.selection.max_kl, "max_new_tokens": float(config.max_new_tokens)}
    health = HealthCallback(HealthMonitor(limits, rules_for(config)), config.health)
    selection = [SelectionCallback(selector, config.selection.every, context.work / "best")] if selector else []
    pass_limits = config.micro_batch_size, config.micro_batch_tokens
    referee = reward_model_fn(inputs.referee.eval(), *pass_limits) if inputs.referee is not None else None
    trainer = Trainer(
        learner=Learner(config, pair, reference, _ptx_data(inputs)),
        reward_fn=reward_fn_of(inputs.reward, inputs.prompts, tokenizer, *pass_limits),
        prompts=inputs.prompts,
        decode=lambda ids: decode_reply(tokenizer, ids)[0],
        moments=copy.deepcopy(inputs.critic.moments) if inputs.critic is not None else RunningMeanStd(),
        context=context,
        callbacks=(*selection, health),
        referee=referee,
    )
    return AssembledPpo(trainer, health, selector)


def default_ppo_config(ptx: bool) -> PpoConfig:
    """Settings that are safe for a pretrained model."""
    return PpoConfig(
        batch_size=32,
        policy_optimizer=OptimizerConfig(lr=DEFAULT_POLICY_LR, schedule="constant", warmup=0.0),
        critic_optimizer=OptimizerConfig(lr=DEFAULT_CRITIC_LR, schedule="constant", warmup=0.0),
        ptx=PtxConfig() if ptx else PtxConfig(weight=0.0),
    )


def _policy_and_reference(model: PreTrainedModel, config: PpoConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A copy to train, and the frozen reference: with adapters the same copy with these switched off."""
    policy = copy.deepcopy(model).eval()
    if config.policy_lora is None:
        policy.requires_grad_(True)
        return policy, model
    add_adapters(policy, config.policy_lora, derive_seed(config.seed, "ppo", "lora"))
    without: Any = WithoutAdapters(policy)
    return policy, without


def _pair(inputs: PpoInputs, policy: PreTrainedModel, context: RunContext) -> ActorCriticPair:
    """The policy with a copy of the critic, or alone, and their engines."""
    config, sampling = inputs.config, Sampling.for_rollouts(inputs.tokenizer, inputs.config.rollout)
    if inputs.critic is None:
        return policy_alone(config, policy, sampling, context)
    critic = copy.deepcopy(inputs.critic.model)
    if config.critic_lora is not None:
        critic.add_adapters(config.critic_lora, derive_seed(config.seed, "ppo", "critic", "lora"))
    return separate_actor_critic(config, policy, critic, sampling, context)


def _ptx_data(inputs: PpoInputs) -> PtxData | None:
    config = inputs.config
    if config.ptx.weight == 0:
        return None
    table = TokenTable.of_rows(inputs.tokenizer, Demonstration.KIND, inputs.demonstrations)
    seed = derive_seed(config.seed, "ppo", "ptx")
    texts = PtxTexts.of_table(table).with_category_shares(config.ptx.category_shares, seed, "ptx.category_shares")
    return PtxData(texts, config.ptx.batch_size, seed, pad_id(inputs.tokenizer))

"""PPO-max on a causal language model that is in memory, with a reward function."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.critic import TrainedCritic, encode_prompts, evaluating, refuse_pipeline_settings
from rlhf_core.api.inputs import checked_tokenizer, require_type, rows_of
from rlhf_core.api.reward_function import RewardFunction, reward_fn_of
from rlhf_core.api.reward_model import TrainedRewardModel
from rlhf_core.api.run_folder import run_context
from rlhf_core.api.selection import CheckpointSelector
from rlhf_core.config.health.rule_changes import rules_for
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.ppo import PpoConfig, PtxConfig, RolloutConfig
from rlhf_core.data.chat import decode_reply, encode_dialogue, pad_id
from rlhf_core.data.schema import Demonstration, Message, Prompt
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.generation import OnPolicyReplies, on_policy_replies
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.selection import CheckpointChoice, SelectionEvaluator
from rlhf_core.models.base import save_policy
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import load_weights
from rlhf_core.models.lora import WithoutAdapters, add_adapters, merge_adapters
from rlhf_core.ppo.actor_critic_pair import separate_actor_critic
from rlhf_core.ppo.callbacks.health import HealthCallback
from rlhf_core.ppo.callbacks.health_monitor import HealthMonitor
from rlhf_core.ppo.callbacks.selection import SelectionCallback
from rlhf_core.ppo.ptx import PtxData
from rlhf_core.ppo.rewards import reward_model_fn
from rlhf_core.ppo.run_checkpoint import load_best
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner
from rlhf_core.sampling.distribution import Sampling
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
    critic: TrainedCritic,
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
        critic: The pre-trained critic, of which a copy is trained further.
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
    require_type(critic, TrainedCritic, "critic")
    score = reward.model if isinstance(reward, TrainedRewardModel) else reward
    judge = referee.model if isinstance(referee, TrainedRewardModel) else referee
    texts = rows_of(Demonstration, demonstrations, "demonstrations") if (demonstrations := list(demonstrations)) else []
    config = config or default_ppo_config(ptx=bool(texts))
    _require_agreement(config, critic, texts)
    if (validation_prompts := list(validation_prompts)) and judge is None:
        raise ConfigError("validation_prompts are judged by a referee, but there is none; give one, or leave them out")
    seed_everything(config.seed)
    tokenizer = checked_tokenizer(tokenizer, model)
    encoded = encode_prompts(prompts, tokenizer, model, config.max_new_tokens)
    policy, reference = _policy_and_reference(model, config)
    value_model = copy.deepcopy(critic.model)
    if config.critic_lora is not None:
        value_model.add_adapters(config.critic_lora, derive_seed(config.seed, "ppo", "critic", "lora"))
    selector, checks = None, list[Sequence[Message]]()
    if judge is not None:
        checks = [row.prompt for row in rows_of(Prompt, validation_prompts, "validation_prompts")]
    limits = {"kl": config.selection.max_kl, "max_new_tokens": float(config.max_new_tokens)}
    health = HealthCallback(HealthMonitor(limits, rules_for(config)), config.health)
    inputs = (config, encoded, checks, texts, score, judge, model, critic.model)
    with evaluating(model), run_context(context, "train_ppo", *inputs) as run:
        if judge is not None:
            selector = _selector(config, reference, tokenizer, checks, judge, score)
        sampling = Sampling.for_rollouts(tokenizer, config.rollout)
        pair = separate_actor_critic(config, policy, value_model, sampling, run)
        selection = [SelectionCallback(selector, config.selection.every, run.work / "best")] if selector else []
        trainer = Trainer(
            learner=Learner(config, pair, reference, _ptx_data(config, texts, tokenizer)),
            reward_fn=reward_fn_of(score, encoded, tokenizer, config.micro_batch_size),
            prompts=encoded,
            decode=lambda ids: decode_reply(tokenizer, ids)[0],
            moments=copy.deepcopy(critic.moments),
            context=run,
            callbacks=(*selection, health),
            referee=reward_model_fn(judge.eval(), config.micro_batch_size) if judge is not None else None,
        )
        trainer.run()
        trained, choice = pair.release_policy(), None
        if selector is not None:
            choice = selector.choice()
            load_weights(trained, load_best(run.work / "best", choice.candidate.iteration))
        history, samples = trainer.history.rows(), trainer.samples.rows()
    if config.policy_lora is not None:
        merge_adapters(trained)
    return TrainedPolicy(trained.eval(), tokenizer, choice, health.findings, history, samples)


def default_ppo_config(ptx: bool) -> PpoConfig:
    """Settings that are safe for a pretrained model."""
    return PpoConfig(
        batch_size=32,
        policy_optimizer=OptimizerConfig(lr=DEFAULT_POLICY_LR, schedule="constant", warmup=0.0),
        critic_optimizer=OptimizerConfig(lr=DEFAULT_CRITIC_LR, schedule="constant", warmup=0.0),
        ptx=PtxConfig() if ptx else PtxConfig(weight=0.0),
    )


def _require_agreement(config: PpoConfig, critic: TrainedCritic, texts: Sequence[Demonstration]) -> None:
    differing = [
        name
        for name in RolloutConfig.model_fields
        if getattr(config.rollout, name) != getattr(critic.rollout, name) and "batch_size" not in name
    ]
    if differing:
        raise ConfigError(
            f"the critic was pre-trained with another {differing[0]} ({getattr(critic.rollout, differing[0])}) than "
            f"this run's ({getattr(config.rollout, differing[0])}); give train_critic rollout=config.rollout"
        )
    refuse_pipeline_settings(config.rollout)
    for name in ("policy_init", "share_base"):
        if getattr(config, name) != PpoConfig.model_fields[name].default:
            raise ConfigError(f"{name} is for the pipeline's stages; the policy starts as the given model here")
    if texts and not config.ptx.weight:
        raise ConfigError("demonstrations are for the ptx loss, but ptx.weight is 0; leave them out, or set a weight")
    if config.ptx.weight and not texts:
        raise ConfigError(
            f"ptx.weight is {config.ptx.weight}, but there are no demonstrations; give some, or set it to 0"
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


def _selector(
    config: PpoConfig,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    referee: ScalarModel,
    reward: RewardFunction | ScalarModel,
) -> CheckpointSelector:
    """The referee on the first ``config.selection.prompts`` validation prompts."""
    prompts = prompts[: config.selection.prompts]
    seed, rows_together = derive_seed(config.seed, "ppo", "selection"), config.selection.batch_size
    sampling = Sampling.for_rollouts(tokenizer, config.rollout)

    def sample(policy: PreTrainedModel) -> OnPolicyReplies:
        return on_policy_replies(policy, tokenizer, prompts, sampling, seed, rows_together)

    judge = ModelJudge(referee.eval(), tokenizer, "referee", rows_together)
    other = ModelJudge(reward, tokenizer, "reward", rows_together) if isinstance(reward, ScalarModel) else None
    return CheckpointSelector(SelectionEvaluator(reference, prompts, judge, sample, other), config.selection)


def _ptx_data(config: PpoConfig, texts: Sequence[Demonstration], tokenizer: PreTrainedTokenizerBase) -> PtxData | None:
    if config.ptx.weight == 0:
        return None
    pairs = [encode_dialogue(tokenizer, row.prompt, row.reply) for row in texts]
    return PtxData(pairs, config.ptx.batch_size, derive_seed(config.seed, "ppo", "ptx"), pad_id(tokenizer))

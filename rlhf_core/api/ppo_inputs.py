"""What a PPO run on objects in memory is made of, checked and encoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.critic import TrainedCritic, encode_prompts, refuse_pipeline_settings
from rlhf_core.api.inputs import checked_tokenizer, require_type, rows_of
from rlhf_core.api.reward_function import RewardFunction
from rlhf_core.api.reward_model import TrainedRewardModel
from rlhf_core.config.stages.ppo import PpoConfig, RolloutConfig
from rlhf_core.data.schema import Demonstration, Message, Prompt
from rlhf_core.errors import ConfigError
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.ppo.rollouts.prompts import TrainingPrompts


@dataclass(frozen=True)
class PpoInputs:
    """The inputs of a run.

    Attributes:
        config: All settings.
        model: The start and the reference.
        tokenizer: The model's, with a chat template.
        prompts: The training prompts.
        reward: The reward function or model.
        critic: The pre-trained critic; None with critic-free advantages.
        referee: The model that selects the checkpoint, if there is one.
        validation_prompts: What the referee judges replies to.
        demonstrations: Texts of the ptx loss.
    """

    config: PpoConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: TrainingPrompts
    reward: RewardFunction | ScalarModel
    critic: TrainedCritic | None
    referee: ScalarModel | None
    validation_prompts: Sequence[Sequence[Message]]
    demonstrations: Sequence[Demonstration]

    @classmethod
    def checked(
        cls,
        config: PpoConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Iterable[Prompt | Mapping[str, Any] | str],
        reward: RewardFunction | ScalarModel | TrainedRewardModel,
        critic: TrainedCritic | None,
        referee: ScalarModel | TrainedRewardModel | None,
        validation_prompts: Sequence[Prompt | Mapping[str, Any] | str],
        demonstrations: Sequence[Demonstration],
    ) -> PpoInputs:
        """Check everything against everything else; see :func:`~rlhf_core.api.ppo.train_ppo` for what is refused."""
        _require_fitting_critic(config, critic)
        if demonstrations and not config.ptx.weight:
            raise ConfigError("demonstrations are for the ptx loss, but ptx.weight is 0: leave them out, or set it")
        if config.ptx.weight and not demonstrations:
            raise ConfigError(f"ptx.weight is {config.ptx.weight}, but there are no demonstrations: give them")
        if validation_prompts and referee is None:
            raise ConfigError("validation_prompts are judged by a referee, but there is none: give one")
        tokenizer = checked_tokenizer(tokenizer, model)
        held_out = rows_of(Prompt, validation_prompts, "validation_prompts") if referee is not None else []
        return cls(
            config,
            model,
            tokenizer,
            encode_prompts(prompts, tokenizer, model, config.max_new_tokens),
            reward.model if isinstance(reward, TrainedRewardModel) else reward,
            critic,
            referee.model if isinstance(referee, TrainedRewardModel) else referee,
            [row.prompt for row in held_out[: config.selection.prompts]],
            demonstrations,
        )

    def identity(self) -> tuple[Any, ...]:
        """Everything that the run depends on, for :func:`~rlhf_core.api.run_folder.run_context`."""
        texts = (self.prompts, self.validation_prompts, self.demonstrations)
        critic = self.critic.model if self.critic is not None else None
        return (self.config, *texts, self.reward, self.referee, self.model, critic)


def _require_fitting_critic(config: PpoConfig, critic: TrainedCritic | None) -> None:
    refuse_pipeline_settings(config.rollout)
    for name in ("policy_init", "share_base"):
        if getattr(config, name) != PpoConfig.model_fields[name].default:
            raise ConfigError(f"{name} is for the pipeline's stages; the policy starts as the given model here")
    estimator = config.advantage.estimator
    if config.advantage.critic_free:
        if critic is not None:
            raise ConfigError(f"advantage.estimator {estimator} needs no critic, but there is one: leave it out")
        return
    if critic is None:
        raise ConfigError(f"advantage.estimator {estimator} needs a critic: give one of train_critic")
    require_type(critic, TrainedCritic, "critic")
    for name in RolloutConfig.model_fields:
        mine, pretrained = getattr(config.rollout, name), getattr(critic.rollout, name)
        if mine != pretrained and "batch_size" not in name:
            raise ConfigError(
                f"the critic was pre-trained with another {name} ({pretrained}) than this run's ({mine}); give "
                "train_critic rollout=config.rollout"
            )

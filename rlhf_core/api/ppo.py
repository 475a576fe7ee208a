"""PPO-max on a causal language model, with a reward function or reward sources."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.critic import MOMENTS, TrainedCritic
from rlhf_core.api.inputs import (
    RewardFunction,
    checked_tokenizer,
    encode_prompts,
    evaluating,
    records_of,
    require_type,
    reward_fn_of,
    reward_folder,
    reward_inputs,
    rows_of,
    run_context,
    token_table,
    with_safe_rates,
)
from rlhf_core.api.reward_model import TrainedRewardModel
from rlhf_core.config.health import rules_for
from rlhf_core.config.ppo import PpoConfig, RolloutConfig
from rlhf_core.config.ppo_losses import PtxConfig
from rlhf_core.data.schema import Demonstration, PretrainText, Prompt
from rlhf_core.data.tokens import TokenTable, decode_reply, pad_id
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.replies import OnPolicyReplies, on_policy_replies
from rlhf_core.evaluation.selection import SelectionEvaluator
from rlhf_core.models.adapters import (
    PeftAdapter,
    WithoutAdapters,
    add_adapters,
    merge_adapters,
    pack_linear_layers,
    peft_adapter,
)
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import load_policy, own_copy, save_policy, say_router_loss
from rlhf_core.models.given import require_plain
from rlhf_core.models.heads import ReplyScorer, ScalarModel
from rlhf_core.models.io import load_weights
from rlhf_core.models.precision import plain_arithmetic
from rlhf_core.models.shared_base import SETTINGS, SharedBase
from rlhf_core.ppo.actor_critic import build_actor_critic
from rlhf_core.ppo.checkpoints import holds_best, load_best
from rlhf_core.ppo.health import HealthGuard, HealthMonitor
from rlhf_core.ppo.reward_sources.source import reward_model_fn
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.selection import CheckpointChoice, CheckpointSelector
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner, PtxData, PtxText, ptx_texts
from rlhf_core.sampling.agreement import require_replies_as_scored
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import Sampler, opened_sampler
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.storage.files import read_json
from rlhf_core.training.engine.factory import device_before
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.history import nonfinite_as_none
from rlhf_core.training.loop import keeping_what_was_made
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext

# The sampler's version of weights that the selection looks at; those of rollouts count from 0.
MEASURED = -1
# The data sets that ``ppo.ptx.data`` names.
PTX_KINDS = {
    "demonstrations": (Demonstration.KIND,),
    "pretrain": (PretrainText.KIND,),
    "both": (Demonstration.KIND, PretrainText.KIND),
}
Critic = TrainedCritic | Path
Scorer = ScalarModel | TrainedRewardModel | Path


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
        metrics: The selected checkpoint, the last iteration, health findings, each rollback.
        adapter: What was trained, with ``policy_lora``; it is merged into ``model``, and saved
            beside it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    choice: CheckpointChoice | None
    findings: list[dict[str, Any]]
    history: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    metrics: dict[str, Any]
    adapter: PeftAdapter | None = None

    def save(self, path: str | Path) -> None:
        """Save model and tokenizer as a Hugging Face folder, checked to compute the same."""
        save_policy(Path(path), self.model, self.tokenizer, adapter=self.adapter)


@plain_arithmetic()
def train_ppo(
    model: PreTrainedModel | Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt | Mapping[str, Any] | str] | TrainingPrompts,
    reward: RewardFunction | Scorer | None = None,
    critic: Critic | None = None,
    *,
    base: PreTrainedModel | Path | None = None,
    referee: Scorer | None = None,
    validation_prompts: Iterable[Prompt | Mapping[str, Any] | str] = (),
    demonstrations: Iterable[Demonstration | Mapping[str, Any]] | TokenTable = (),
    pretrain: Iterable[PretrainText | Mapping[str, Any] | str] | TokenTable = (),
    config: PpoConfig | None = None,
    context: RunContext | None = None,
    allow_high_learning_rates: bool = False,
) -> TrainedPolicy:
    """Optimise ``model`` with PPO-max (algorithms.md §4–§7; paper, sections 5 and 6).

    The health rules watch the run; with ``config.health.mode: enforce`` they pause it or roll it
    back. A high reward does not show that the policy is better: give a ``referee``, or compare the
    result with ``model`` by other means.

    Models may be given as folders, which are then loaded when there is room for them; a model in
    memory is copied and left as it is. Data may be given tokenised.

    Args:
        model: The model to start from, which is the reference too.
        tokenizer: Its tokenizer.
        prompts: Strings, or records such as ``{"prompt": ...}``; see docs/data-formats.md.
        reward: ``f(prompts, replies)`` with one number per reply, or a reward model of the same
            tokenizer. None takes ``config.reward.sources``, whose paths are relative to
            ``context.folder``; a folder takes them, too, and is the reward model that they call
            ``models/reward``.
        critic: The pre-trained critic, of which a copy is trained further; None with critic-free
            advantages (``config.advantage.estimator`` rloo or grpo).
        base: What the policy starts from with ``config.policy_init: base``.
        referee: A second reward model, not trained on what ``reward`` was trained on: it selects
            the checkpoint.
        validation_prompts: What the referee judges replies to; needed with a referee.
        demonstrations: Texts of the ptx loss, if ``config.ptx.data`` names them.
        pretrain: Plain texts of the ptx loss, if ``config.ptx.data`` names them.
        config: Settings; by default with the ptx loss if there are texts. Learning rates that are
            left out are such as suit the model.
        context: Where to report and to keep partial state; by default nowhere.
        allow_high_learning_rates: Allows a pretrained model rates that usually wreck it.

    Raises:
        ConfigError: Settings contradict each other, the critic or what was given, or a learning
            rate is far beyond what suits a pretrained model.
        DataError: A prompt leaves no room for a reply, or the reward function breaks its contract.
        TrainingPaused: A health rule paused the run, or three steps in a row were not finite. Its
            attribute ``trained``, like that of any error during training, is the policy until then
            with history and findings.
    """
    require_type(config, PpoConfig, "config")
    require_plain(model, "model")
    require_plain(base, "base")
    tokenizer = checked_tokenizer(tokenizer, model)
    tables = {
        Demonstration.KIND: token_table(demonstrations, Demonstration, tokenizer, "demonstrations"),
        PretrainText.KIND: token_table(pretrain, PretrainText, tokenizer, "pretrain"),
    }
    texts = {kind: table for kind, table in tables.items() if table is not None}
    config = config or default_ppo_config(ptx=bool(texts))
    of_adapters = isinstance(critic, Path) and (critic / SETTINGS).is_file()
    config = with_safe_rates(config, model, allow_high_learning_rates, adapters=of_adapters)
    encoded = encode_prompts(prompts, tokenizer, model, config.max_new_tokens)
    held_out = records_of(validation_prompts, "validation_prompts")
    judged = rows_of(Prompt, held_out, "validation_prompts") if held_out else []
    judged = judged[: config.selection.prompts]
    if isinstance(reward, TrainedRewardModel):
        reward = reward.model
    if isinstance(referee, TrainedRewardModel):
        referee = referee.model
    inputs = PpoInputs(
        config, model, tokenizer, encoded, reward, critic, base, referee, judged, texts
    )
    value_model = critic.model if isinstance(critic, TrainedCritic) else critic
    for name, scalar in (("reward", reward), ("referee", referee), ("critic", value_model)):
        require_plain(scalar if isinstance(scalar, nn.Module) else None, name)
    inputs.require_consistent()
    seed_everything(config.seed)
    identity = inputs.identity() | reward_inputs(reward, config, context)
    with (
        evaluating(model, reward, referee),
        run_context(context, "train_ppo", identity) as run,
    ):
        if not isinstance(model, Path):  # that of a folder was asked when it became one
            require_replies_as_scored(model, "model")
        with opened_sampler(config.sampler, run.work, run.folder) as sampler:
            trainer = assemble(inputs, run, sampler)
            with keeping_what_was_made(run, lambda: trained_so_far(trainer, inputs)):
                trainer.run()
        choice = trainer.selector.choice() if trainer.selector is not None else None
        return outcome(trainer, inputs, choice)


def trained_so_far(trainer: Trainer, inputs: PpoInputs) -> TrainedPolicy | None:
    """Return the policy of a run that ended early; None before its first iteration.

    It is the referee's choice among the earlier checkpoints if that is on the disk, else the last
    one.
    """
    if not trainer.history.rows():
        return None
    selector, choice = trainer.selector, None
    if selector is not None and selector.candidates:
        trainer.checkpoints.manager.finish()
        best = selector.choice()
        if holds_best(selector.folder, best.candidate.iteration):
            choice = best
    return outcome(trainer, inputs, choice)


def outcome(trainer: Trainer, inputs: PpoInputs, choice: CheckpointChoice | None) -> TrainedPolicy:
    """Take the policy out of its engines, with the weights of ``choice`` if there is one."""
    trained = trainer.learner.pair.release_policy()
    if choice is not None:
        assert trainer.selector is not None
        load_weights(trained, load_best(trainer.selector.folder, choice.candidate.iteration))
    history, samples = trainer.history.rows(), trainer.samples.rows()
    adapter = None
    if inputs.config.policy_lora is not None:
        adapter = peft_adapter(trained)
        merge_adapters(trained)
    assert trainer.health is not None
    findings = trainer.health.findings
    metrics = summary(trainer, history, findings, choice)
    return TrainedPolicy(
        trained.eval(), inputs.tokenizer, choice, findings, history, samples, metrics, adapter
    )


@dataclass(frozen=True)
class PpoInputs:
    """What a run is made of, encoded; see :func:`train_ppo`."""

    config: PpoConfig
    model: PreTrainedModel | Path
    tokenizer: PreTrainedTokenizerBase
    prompts: TrainingPrompts
    reward: RewardFunction | ScalarModel | Path | None
    critic: Critic | None
    base: PreTrainedModel | Path | None
    referee: ScalarModel | Path | None
    validation_prompts: Sequence[Prompt]
    texts: Mapping[str, TokenTable]

    def identity(self) -> dict[str, Any]:
        """Return everything but the reward that the run depends on, by name."""
        critic: Any = self.critic
        if isinstance(critic, TrainedCritic):
            critic = [critic.model, critic.moments]
        return {
            "config": self.config,
            "prompts": self.prompts,
            "validation_prompts": list(self.validation_prompts),
            **self.texts,
            "referee": self.referee,
            "model": self.model,
            "base": self.base,
            "critic": critic,
        }

    def require_consistent(self) -> None:
        """Check settings against each other and against what was given.

        Raises:
            ConfigError: They contradict each other.
        """
        config, estimator = self.config, self.config.advantage.estimator
        needed = PTX_KINDS[config.ptx.data] if config.ptx.weight else ()
        for kind in self.texts.keys() - {*needed}:
            unread = f"ptx.data is {config.ptx.data}" if config.ptx.weight else "ptx.weight is 0"
            raise ConfigError(
                f"{kind} is for the ptx loss, but {unread}: leave it out, or set that"
            )
        if needed and not self.texts:
            raise ConfigError(
                f"ptx.weight is {config.ptx.weight}, but there are no {' or '.join(needed)}: give them"
            )
        if not isinstance(self.referee, ScalarModel | Path | None):
            raise ConfigError(
                f"referee is a {type(self.referee).__name__}; give a reward model or the folder of one"
            )
        if self.validation_prompts and self.referee is None:
            raise ConfigError(
                "validation_prompts are judged by a referee, but there is none: give one"
            )
        if self.referee is not None and not self.validation_prompts:
            raise DataError("validation_prompts is empty; the referee needs at least one")
        if config.policy_init == "base" and self.base is None:
            raise ConfigError(
                "policy_init is base, but there is no base: give the model that the policy starts from"
            )
        of_folders = isinstance(self.model, Path) and isinstance(self.referee, Path | None)
        if config.share_base and not of_folders:
            raise ConfigError(
                "share_base shares the weights of folders: give model and referee as folders, or unset it"
            )
        if config.advantage.critic_free:
            if isinstance(self.critic, TrainedCritic):
                raise ConfigError(
                    f"advantage.estimator {estimator} needs no critic, but there is one: leave it out"
                )
            return
        if self.critic is None:
            raise ConfigError(
                f"advantage.estimator {estimator} needs a critic: give one of train_critic"
            )
        if isinstance(self.critic, Path):
            return
        require_type(self.critic, TrainedCritic, "critic")
        for name in RolloutConfig.model_fields:
            mine, pretrained = getattr(config, name), getattr(self.critic.rollout, name)
            if mine != pretrained and "batch_size" not in name and name != "sampler":
                raise ConfigError(
                    f"the critic was pre-trained with another {name} ({pretrained}) than this run's ({mine}); give "
                    "train_critic rollout=config.rollout"
                )


def assemble(inputs: PpoInputs, context: RunContext, sampler: Sampler) -> Trainer:
    """Build the trainer: models in engines, the reward function, selection and health rules.

    The order matters where models come from folders: the device may have no room for reference and
    policy as loaded, so that the reference is placed before the policy is loaded. Where this
    process samples, SFT's replies come before.
    """
    config, tokenizer, frozen = inputs.config, inputs.tokenizer, FrozenModels(context.launch)
    reference, adapted = _reference(inputs, frozen)
    # Whether the reference is apart from the policy and from what the caller has in memory.
    apart = adapted is None and isinstance(inputs.model, Path)
    samples_here = config.sampler.kind == "local"
    if apart and not samples_here:
        reference = frozen.place(reference)
    own = reward_folder(inputs.reward, context)
    selector = referee = None
    if inputs.referee is not None:
        proxy = own if isinstance(own, Path) and own.is_dir() else inputs.reward
        judge, reward_judge = _scorer(inputs.referee, frozen), _scorer(proxy, frozen)
        assert judge is not None
        limits = MicroBatchLimits(config.micro_batch_size, config.micro_batch_tokens)
        referee = reward_model_fn(judge, limits)
        with frozen.on_device():
            evaluator = _evaluator(inputs, reference, judge, reward_judge, sampler)
        selector = CheckpointSelector(evaluator, config.selection, context.work / "best")
    if adapted is not None:
        policy = adapted
    else:
        if apart and samples_here:
            reference = frozen.place(reference)
        start = inputs.model if config.policy_init == "sft" else inputs.base
        policy = _own_copy(start, device_before(context.launch))
    if selector is not None:
        evaluator.reference = reference
    reward_fn = reward_fn_of(inputs.reward, config, inputs.prompts, tokenizer, frozen, context)
    critic, moments = _critic(inputs, frozen, own)
    sampling = Sampling.for_rollouts(tokenizer, config)
    pair = build_actor_critic(config, policy, critic, sampling, context)
    limits_of_health = {
        "kl": config.selection.max_kl,
        "max_new_tokens": float(config.max_new_tokens),
    }
    monitor = HealthMonitor(limits_of_health, rules_for(config.health, config.kl.coefficient))
    ptx = ptx_data(config, inputs.texts, pad_id(tokenizer), positions_of(policy.config))
    return Trainer(
        learner=Learner(config, pair, reference, ptx),
        reward_fn=reward_fn,
        prompts=inputs.prompts,
        decode=lambda ids: decode_reply(tokenizer, ids)[0],
        moments=moments,
        context=context,
        selector=selector,
        health=HealthGuard(monitor, config.health),
        referee=referee,
        frozen=frozen,
        sampler=sampler,
    )


def default_ppo_config(ptx: bool) -> PpoConfig:
    """Return settings for a small machine, with the ptx loss if there are texts for it."""
    return PpoConfig(batch_size=32, ptx=PtxConfig() if ptx else PtxConfig(weight=0.0))


def summary(
    trainer: Trainer,
    history: list[dict[str, Any]],
    findings: list[dict[str, Any]],
    choice: CheckpointChoice | None,
) -> dict[str, Any]:
    """Return the run's metrics: selected checkpoint, last iteration, findings, rollbacks."""
    journal = trainer.checkpoints.journal
    last = {name: value for name, value in history[-1].items() if isinstance(value, int | float)}
    # A mean reward that is not finite is null in the history.
    first_reward, last_reward = history[0]["reward_mean"], history[-1]["reward_mean"]
    reward_gain = None
    if first_reward is not None and last_reward is not None:
        reward_gain = last_reward - first_reward
    metrics: dict[str, Any] = {}
    for number, entry in enumerate(journal.entries, start=1):
        metrics[f"rollback_{number}"] = entry.record()
    pauses = [finding for finding in findings if finding["action"] == "pause"]
    metrics |= {
        "iterations": trainer.done,
        "skipped_steps": sum(row["skipped_steps"] for row in history),
        "findings": len(findings),
        "pauses": len(pauses),
        "rollbacks": len(journal),
        "reward_gain": reward_gain,
        "last": last,
    }
    if choice is not None:
        metrics["selected_iteration"] = choice.candidate.iteration
        metrics["admissible"] = int(choice.admissible)
        selected = asdict(choice.candidate)
        # A win rate is named by its judge here as among the metrics of the evaluation.
        selected["referee"] = {name: selected.pop(name) for name in ("win_rate", "win_rate_error")}
        metrics["selected"] = nonfinite_as_none(selected)
    return metrics


def _own_copy(
    given: PreTrainedModel | Path | None, device: torch.device | None = None
) -> PreTrainedModel:
    """Return a model to train: a copy, or loaded from its folder, by default on the own device."""
    assert given is not None
    if isinstance(given, Path):
        policy, _ = load_policy(given, device=device)
    else:
        policy = own_copy(given).eval()
    say_router_loss(policy, False, "ppo")
    return policy


def _reference(
    inputs: PpoInputs, frozen: FrozenModels
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Return the frozen reference, and the policy where that is trained as adapters.

    The reference is then the policy without them. With ``share_base`` its weights serve the
    ``frozen`` models too.
    """
    config, given = inputs.config, inputs.model
    if config.policy_lora is None:
        if not isinstance(given, Path):
            return given, None
        device = frozen.loading if config.sampler.kind != "local" else None
        reference, _ = load_policy(given, device=device)
        return reference.requires_grad_(False), None
    model = _own_copy(given)
    if config.share_base:
        assert isinstance(given, Path)
        model.requires_grad_(False)
        if config.policy_lora.quantize is not None:
            pack_linear_layers(model)
        frozen.base = SharedBase(model, given)
    add_adapters(model, config.policy_lora, derive_seed(config.seed, "ppo", "lora"))
    without: Any = WithoutAdapters(model)
    return without, model


def _scorer(given: Any, frozen: FrozenModels) -> ReplyScorer | None:
    """Return a judge of replies, if ``given`` is a model or the folder of one."""
    if isinstance(given, Path):
        scorer: ReplyScorer = frozen.scalar(given)
        return scorer
    return given.eval() if isinstance(given, ScalarModel) else None


def _evaluator(
    inputs: PpoInputs,
    reference: PreTrainedModel,
    referee: ReplyScorer,
    reward: ReplyScorer | None,
    sampler: Sampler,
) -> SelectionEvaluator:
    """Let ``referee`` compare replies to fixed prompts with those of ``reference``.

    They are sampled as PPO samples. The ``reward`` model is for the metric ``referee_gap`` alone;
    None where the reward is no model.
    """
    config, tokenizer = inputs.config, inputs.tokenizer
    seed, together = derive_seed(config.seed, "ppo", "selection"), config.selection.batch_size
    sampling = Sampling.for_rollouts(tokenizer, config)
    prompts = [row.prompt for row in inputs.validation_prompts]

    def sample(policy: PreTrainedModel) -> OnPolicyReplies:
        sampler.sync(policy, MEASURED)
        replies = on_policy_replies(policy, tokenizer, prompts, sampling, seed, together, sampler)
        sampler.release()
        return replies

    judge = ModelJudge(referee, tokenizer, "referee", together)
    proxy = ModelJudge(reward, tokenizer, "reward", together) if reward is not None else None
    return SelectionEvaluator(reference, inputs.validation_prompts, judge, sample, proxy)


def _critic(
    inputs: PpoInputs, frozen: FrozenModels, reward: Path | None
) -> tuple[ScalarModel | None, RunningMeanStd]:
    """Return a copy of the pre-trained critic, and the moments of raw rewards that it saw.

    Without one the moments begin with PPO. Pre-trained as adapters, it keeps those on the policy's
    frozen weights where these are shared.
    """
    config, given = inputs.config, inputs.critic
    if config.advantage.critic_free or given is None:
        return None, RunningMeanStd()
    if isinstance(given, TrainedCritic):
        critic, moments = copy.deepcopy(given.model), copy.deepcopy(given.moments)
    else:
        moments = RunningMeanStd.from_dict(read_json(given / MOMENTS))
        of_adapters = (given / SETTINGS).is_file()
        if frozen.base is not None and of_adapters and config.critic_mode != "shared":
            return frozen.base.scalar(given, through=reward), moments
        critic = ScalarModel.load(given, device=device_before(frozen.launch, config.critic_lora))
    if config.critic_lora is not None:
        critic.add_adapters(config.critic_lora, derive_seed(config.seed, "ppo", "critic", "lora"))
    return critic, moments


def ptx_data(
    config: PpoConfig, texts: Mapping[str, TokenTable], pad: int, positions: int | None
) -> PtxData | None:
    """Return the texts of the ptx loss without those longer than the model's positions."""
    if config.ptx.weight == 0:
        return None
    seed, shares = derive_seed(config.seed, "ppo", "ptx"), config.ptx.category_shares
    tables = [texts[kind] for kind in PTX_KINDS[config.ptx.data] if kind in texts]
    fitting = [ptx_texts(table, positions, shares, seed) for table in tables]
    # It takes all that have a length and items.
    joined: ConcatDataset[PtxText] = ConcatDataset(fitting)  # type: ignore[arg-type]
    return PtxData(joined, config.ptx.batch_size, seed, pad)

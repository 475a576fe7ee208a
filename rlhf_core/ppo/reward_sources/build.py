"""Builds the reward function of ``ppo.reward.sources``.

Every source is loaded, checked and tried before training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.reward_sources import (
    OWN_MODEL,
    ClassifierSource,
    EnsembleSource,
    FunctionSource,
    ModelSource,
    RewardSource,
    RewardSources,
    refuse_own_model,
    source_names,
)
from rlhf_core.data.schema import Demonstration, Message, read_rows
from rlhf_core.data.tokens import encode_dialogue, encode_reply, left_pad, pad_id, right_pad
from rlhf_core.errors import ModelError
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.models.classifiers import AutoScalarModel
from rlhf_core.models.foreign import require_openable
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import is_local
from rlhf_core.plugins import REWARD_SOURCES, made_by_plugin
from rlhf_core.ppo.reward_sources.functions import FunctionReward, PluggedSource, PythonFunction
from rlhf_core.ppo.reward_sources.source import (
    SIGNATURE,
    PromptReader,
    RankShared,
    Replies,
    RewardFn,
    RewardMixture,
    RewardModelSource,
    Source,
    WeightedSource,
    reward_model_fn,
)
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.sampling.token_scoring import MICRO_BATCH, MicroBatchLimits, Tokens
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.examples import collate

ORIGIN_REPLIES = 256
PROBES = ("Yes.", "I do not know.")


@dataclass(frozen=True)
class SourceContext:
    """What reward sources are built from.

    Attributes:
        reward: Folder of the pipeline's own reward model.
        clean: Folder of the clean data.
        tokenizer: The policy's tokenizer.
        prompts: The prompts that rollouts begin with.
        device: Where the policy is.
        frozen: The frozen models of the run.
        limits: Sequences and positions of one pass of a reward model.
    """

    reward: Path
    clean: Path
    tokenizer: PreTrainedTokenizerBase
    prompts: TrainingPrompts
    device: torch.device
    frozen: FrozenModels = field(default_factory=FrozenModels)
    limits: MicroBatchLimits = field(default_factory=MicroBatchLimits)

    @property
    def workspace(self) -> Path:
        """The folder that relative paths start from."""
        return self.reward.parent.parent

    def folder(self, path: str) -> Path:
        """A path of the settings, from the workspace."""
        return self.workspace / os.path.expanduser(path)


def build_reward_fn(sources: RewardSources, context: SourceContext) -> RewardMixture:
    """Build the weighted sum of ``sources``, and have each of them reward two made-up replies.

    So what is wrong shows at the start of a stage rather than after hours.

    Raises:
        ConfigError, ModelError, DataError: A source cannot be loaded, or breaks its contract.
    """
    weighted = []
    for name, source in zip(source_names(sources), sources, strict=True):
        built = build_source(source, name, context)
        weighted.append(WeightedSource(name, source.weight, built))
    mixture = RewardMixture(weighted, PromptReader(context.prompts), context.tokenizer)
    with context.frozen.on_device():
        mixture(probe(context))
    return mixture


def build_source(source: RewardSource, name: str, context: SourceContext) -> Source:
    """Build one source, for use by several ranks together.

    Reward models share the rows of a batch among the ranks themselves. Sources with libraries of
    their own are imported only where they are used.
    """
    who = f"reward source '{name}'"
    if isinstance(source, ModelSource):
        if _is_own(source.path, context):
            model = context.frozen.scalar(context.reward)
            return RewardModelSource(reward_model_fn(model, context.limits))
        model = _reward_model(source.path, who, context, context.frozen.loading)
        return RewardModelSource(_reward_fn(model, context))
    if isinstance(source, EnsembleSource):
        models = [_reward_model(path, who, context) for path in source.paths]
        origins = [0.0] * len(models)
        if source.center:
            origins = [reward_origin(model, context.clean, context.tokenizer) for model in models]
        members = [_reward_fn(model, context) for model in models]
        return EnsembleRewards(members, origins, source.k)
    if isinstance(source, ClassifierSource):
        from rlhf_core.ppo.reward_sources.classifier import load_classifier

        folder = context.folder(source.model)
        place: str | Path = folder
        if not folder.is_dir() and not is_local(source.model):
            place = source.model  # maybe a hub id
        elif folder.resolve() != context.folder(OWN_MODEL).resolve():
            refuse_own_model(folder, who, context.workspace)
        classifier = load_classifier(place, source, context.device, who)
        context.frozen.place_whole(classifier.model)
        return RankShared(classifier)
    if isinstance(source, FunctionSource):
        from rlhf_core.runtime.user_function import load_function

        function = load_function(source.target, context.workspace, who, SIGNATURE)
        called = FunctionReward(function, source.call, source.timeout_seconds)
        columns = list(context.prompts.columns)
        return RankShared(PythonFunction(called, f"{who} ({source.target})", columns))
    score = made_by_plugin(REWARD_SOURCES, source.kind, source.make_scorer, context.workspace)
    return RankShared(PluggedSource(score, f"{who} ({source.kind})"))


def probe(context: SourceContext) -> Tokens:
    """The first prompts with made-up replies, as a rollout would hold them."""
    pad = pad_id(context.tokenizer)
    prompts = context.prompts.ids[: len(PROBES)]
    ids, mask = left_pad(prompts, pad)
    replies = [encode_reply(context.tokenizer, text) for text in PROBES[: len(prompts)]]
    reply_ids, reply_mask = right_pad(replies, pad)
    tokens = torch.cat([ids, reply_ids], dim=1).to(context.device)
    attention = torch.cat([mask, reply_mask], dim=1).to(context.device)
    return Tokens(tokens, attention, reply_mask.bool().to(context.device))


def _reward_fn(model: ScalarModel, context: SourceContext) -> RewardFn:
    return reward_model_fn(context.frozen.place(model), context.limits)


def _reward_model(
    path: str, who: str, context: SourceContext, device: torch.device | None = None
) -> ScalarModel:
    """Load a frozen reward model that reads the policy's tokens.

    It is on ``device``, or else on this process's own.
    """
    folder = context.folder(path)
    is_own = _is_own(path, context)
    if not is_own:
        refuse_own_model(folder, who, context.workspace)
        require_openable(folder, auto_class=AutoScalarModel)
    model = ScalarModel.load(folder, device=device)
    if not is_own:
        require_same_tokens(folder, context.tokenizer)
    return model.eval().requires_grad_(False)


def _is_own(path: str, context: SourceContext) -> bool:
    """Whether ``path`` is the reward model that was trained for this policy.

    Its usual name stands for it.
    """
    folder = context.folder(path)
    return path == OWN_MODEL or folder.resolve() == context.reward.resolve()


@dataclass
class EnsembleRewards:
    """``mean - k * std`` over members (population std), each relative to its ``origin``.

    Source: Coste et al. 2023, "Reward model ensembles help mitigate overoptimization"
    (uncertainty-weighted
    optimisation, there with the variance). Metric ``spread``: mean std over the batch.
    """

    members: Sequence[RewardFn]
    origins: Sequence[float]
    k: float
    metrics: dict[str, float] = field(default_factory=dict)

    def rewards(self, replies: Replies) -> Tensor:
        """(B,); a member's reward that is not finite makes the result not finite."""
        columns = []
        for member, origin in zip(self.members, self.origins, strict=True):
            columns.append(member(replies.tokens) - origin)
        rewards = torch.stack(columns)
        spread = rewards.std(dim=0, unbiased=False)
        self.metrics = {"spread": float(spread.mean())}
        return rewards.mean(dim=0) - self.k * spread


def require_same_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model in ``folder`` was trained on the tokens that ``tokenizer`` makes.

    Raises:
        ModelError: It has another vocabulary or chat template.
    """
    own = load_tokenizer(folder)
    dialogue = [
        Message("user", "What colour is the sky?\n"),
        Message("assistant", "Blue."),
        Message("user", "Why? é"),
    ]
    same_vocabulary = own.get_vocab() == tokenizer.get_vocab()
    same_end = own.eos_token_id == tokenizer.eos_token_id
    encoded = encode_dialogue(own, dialogue, "It is.")
    same_ids = encoded == encode_dialogue(tokenizer, dialogue, "It is.")
    if not (same_vocabulary and same_end and same_ids):
        raise ModelError(
            f"the reward model {folder} has another tokenizer or chat template than the policy, so it cannot read the "
            "policy's tokens; use it as kind classifier, which encodes replies with the model's own tokenizer"
        )


@torch.inference_mode()
def reward_origin(model: ScalarModel, clean: Path, tokenizer: PreTrainedTokenizerBase) -> float:
    """Mean reward of ``model`` on up to 256 demonstrations, the same ones every time.

    They are from the train split.

    Ids are content hashes, so the first of them are a fixed sample. Demonstrations beyond the
    model's positions are left out.

    Raises:
        ModelError: No demonstration fits the model.
    """
    path = clean / "demonstrations" / "train.parquet"
    rows = sorted(read_rows(path, Demonstration), key=lambda row: row.id)
    positions = positions_of(model.model.config)
    fitting = []
    for row in rows[:ORIGIN_REPLIES]:
        prompt, reply = encode_dialogue(tokenizer, row.prompt, row.reply)
        if positions is None or len(prompt) + len(reply) <= positions:
            fitting.append((prompt, reply))
    if not fitting:
        raise ModelError(
            f"no demonstration of {path} fits the model, so its score has no origin; set center to false"
        )
    total = 0.0
    for start in range(0, len(fitting), MICRO_BATCH):
        prompts, replies = zip(*fitting[start : start + MICRO_BATCH], strict=True)
        batch = collate(prompts, replies, pad_id(tokenizer)).to(model.model.device)
        scores = model.reply_scores(batch.input_ids, batch.attention_mask, batch.reply_mask)
        total += float(scores.double().sum())
    return total / len(fitting)

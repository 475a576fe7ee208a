"""From ``ppo.reward.sources`` to a scorer: every source is loaded, checked and tried before anything trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.reward_sources import (
    OWN_MODEL,
    ClassifierSource,
    EnsembleSource,
    FunctionSource,
    HttpSource,
    ModelSource,
    RewardSource,
    RewardSources,
    source_names,
)
from rlhf_core.data.chat import encode_reply, left_pad, pad_id, right_pad
from rlhf_core.data.schema import Prompt
from rlhf_core.errors import ConfigError
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import is_local
from rlhf_core.ppo.reward_sources.mixture import Mixture, Part
from rlhf_core.ppo.reward_sources.reward_models import Ensemble, RewardModel, origin, require_same_tokens
from rlhf_core.ppo.reward_sources.shared import Shared
from rlhf_core.ppo.reward_sources.source import PromptReader, Source
from rlhf_core.ppo.rollout import Scorer, model_scorer
from rlhf_core.ppo.setup import load_scalar
from rlhf_core.sampling.token_scoring import Tokens
from rlhf_core.training.engine.frozen import FrozenModels

PROBES = ("Yes.", "I do not know.")


@dataclass(frozen=True)
class Setting:
    """What sources are built from: the pipeline's own reward model, clean data, and the policy's view of prompts."""

    reward: Path
    clean: Path
    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[Prompt]
    prompt_ids: Sequence[Sequence[int]]
    micro_batch_size: int | None
    device: torch.device
    frozen: FrozenModels = field(default_factory=FrozenModels)

    @property
    def workspace(self) -> Path:
        """The folder that relative paths start from."""
        return self.reward.parents[1]


def build_scorer(sources: RewardSources, setting: Setting) -> Mixture:
    """The weighted sum of ``sources``, after each has scored two made-up replies.

    ``ConfigError``, ``ModelError`` or ``DataError`` when one cannot be had, names things that do not exist or breaks
    its contract: at the start of a stage rather than after hours.
    """
    parts = [
        Part(name, source.weight, for_ranks(build_source(source, name, setting)))
        for name, source in zip(source_names(sources), sources, strict=True)
    ]
    reader = PromptReader([row.prompt for row in setting.rows], setting.prompt_ids)
    mixture = Mixture(parts, reader, setting.tokenizer)
    with setting.frozen.on_device():
        mixture(probe(setting))
    return mixture


def for_ranks(source: Source) -> Source:
    """``source`` as several ranks use it together. Reward models share the rows of a batch among ranks themselves."""
    return source if isinstance(source, RewardModel | Ensemble) else Shared(source)


def build_source(source: RewardSource, name: str, setting: Setting) -> Source:
    """One source. Sources with libraries of their own are imported only where they are used."""
    who = f"reward source '{name}'"
    if isinstance(source, ModelSource):
        if _is_own(source.path, setting):
            return RewardModel(model_scorer(setting.frozen.scalar(setting.reward), setting.micro_batch_size))
        return RewardModel(_scorer(_reward_model(source.path, who, setting), setting))
    if isinstance(source, EnsembleSource):
        return _ensemble(source, who, setting)
    if isinstance(source, ClassifierSource):
        from rlhf_core.ppo.reward_sources.classifier import load_classifier

        found = load_classifier(_model_source(source.model, who, setting.workspace), source, setting.device, who)
        setting.frozen.place_whole(found.model)
        return found
    if isinstance(source, FunctionSource):
        from rlhf_core.ppo.reward_sources.python_function import PythonFunction, load_function

        return PythonFunction(load_function(source.target, setting.workspace, who), f"{who} ({source.target})")
    assert isinstance(source, HttpSource)
    from rlhf_core.ppo.reward_sources.http_scorer import HttpScorer

    return HttpScorer(source, f"{who} ({source.url})")


def probe(setting: Setting) -> Tokens:
    """The first prompts with made-up replies, as a rollout would hold them."""
    prompts = setting.prompt_ids[: len(PROBES)]
    ids, mask = left_pad(prompts, pad_id(setting.tokenizer))
    replies = [encode_reply(setting.tokenizer, text) for text in PROBES[: len(prompts)]]
    reply_ids, reply_mask = right_pad(replies, pad_id(setting.tokenizer))
    tokens, attention = torch.cat([ids, reply_ids], dim=1), torch.cat([mask, reply_mask], dim=1)
    return Tokens(tokens.to(setting.device), attention.to(setting.device), reply_mask.bool().to(setting.device))


def _ensemble(source: EnsembleSource, who: str, setting: Setting) -> Ensemble:
    models = [_reward_model(path, who, setting) for path in source.paths]
    origins = [origin(model, setting.clean, setting.tokenizer) if source.center else 0.0 for model in models]
    return Ensemble([_scorer(model, setting) for model in models], origins, source.k)


def _scorer(model: ScalarModel, setting: Setting) -> Scorer:
    return model_scorer(setting.frozen.place(model), setting.micro_batch_size)


def _reward_model(path: str, who: str, setting: Setting) -> ScalarModel:
    """A frozen reward model that reads the policy's tokens."""
    if _is_own(path, setting):
        return load_scalar(setting.reward).to(setting.device)
    folder = _folder(path, setting.workspace)
    _refuse_own(folder, who, setting.workspace)
    model = load_scalar(folder)
    require_same_tokens(folder, setting.tokenizer)
    return model.to(setting.device)


def _model_source(model: str, who: str, workspace: Path) -> str | Path:
    """A folder of the workspace where there is one, else what may be a hub id."""
    folder = _folder(model, workspace)
    if not folder.is_dir() and not is_local(model):
        return model
    if folder.resolve() != (workspace / OWN_MODEL).resolve():
        _refuse_own(folder, who, workspace)
    return folder


def _is_own(path: str, setting: Setting) -> bool:
    """Whether ``path`` is the reward model that the pipeline trained."""
    return _folder(path, setting.workspace).resolve() == setting.reward.resolve()


def _folder(path: str, workspace: Path) -> Path:
    return workspace / Path(path).expanduser()


def _refuse_own(folder: Path, who: str, workspace: Path) -> None:
    """``ConfigError`` for the pipeline's other models, above all the referee, by which the policy is selected."""
    if folder.resolve().is_relative_to((workspace / OWN_MODEL).parent.resolve()):
        raise ConfigError(
            f"{who}: {folder} is one of the pipeline's own models, of which only {OWN_MODEL} may score: the policy "
            "must not be trained on what selects and judges it; keep other reward models in a folder of their own"
        )

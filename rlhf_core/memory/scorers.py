"""The models that score rollouts: those that ``ppo.reward.sources`` name, each once."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.reward_sources import (
    OWN_MODEL,
    ClassifierSource,
    EnsembleSource,
    ModelSource,
    RewardSource,
    source_names,
)
from rlhf_core.errors import ModelError
from rlhf_core.memory.roles import Role
from rlhf_core.memory.setting import Setting
from rlhf_core.memory.shape_sources import shape_of_folder


def scorers(setting: Setting) -> list[Role]:
    """Frozen models of the sources. Functions and servers hold none here, and of a classifier on the hub the size is
    not known."""
    sources = setting.params.ppo.reward.sources
    return [
        role
        for name, source in zip(source_names(sources), sources, strict=True)
        for role in _models(setting, name, source)
    ]


def _models(setting: Setting, name: str, source: RewardSource) -> Iterator[Role]:
    if isinstance(source, ModelSource):
        yield setting.frozen("reward" if source.path == OWN_MODEL else name, _parameters(setting, source.path))
    elif isinstance(source, EnsembleSource):
        for number, path in enumerate(source.paths, 1):
            yield setting.frozen(f"{name} {number}", _parameters(setting, path))
    elif isinstance(source, ClassifierSource) and (setting.root / source.model).is_dir():
        yield setting.frozen(name, _parameters(setting, source.model))


def _parameters(setting: Setting, path: str) -> int:
    """Of the model in a folder, or before it is there as many as the starting model's shape gives."""
    folder = setting.root / path
    if path == OWN_MODEL or not (folder / "config.json").is_file():
        return setting.shape.scalar
    try:
        return shape_of_folder(folder).scalar
    except ModelError:
        # Another family: its size is at least no worse a guess than nothing.
        return setting.shape.scalar

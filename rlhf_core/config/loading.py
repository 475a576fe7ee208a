"""params.yaml as typed and checked settings: the whole of it, or one section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rlhf_core.config import yaml_text
from rlhf_core.config.consistency import require_consistent
from rlhf_core.config.model import StageConfig, Strict
from rlhf_core.config.params import Params
from rlhf_core.config.problems import describe
from rlhf_core.errors import ConfigError
from rlhf_core.redaction import holds_key

PARAMS_FILE = "params.yaml"
Model = TypeVar("Model", bound=Strict)


def check_params(document: Any, name: str = PARAMS_FILE) -> Params:
    """Return a document as :class:`Params`, its sections checked alone and against each other.

    Raises:
        ConfigError: One line for each problem, with its path.
    """
    try:
        params = Params.model_validate(yaml_text.plain(document))
    except ValidationError as error:
        raise ConfigError(describe(name, error, Params, "")) from error
    for path, text in _texts(yaml_text.plain(document), ""):
        if holds_key(text):
            raise ConfigError(
                f"{name}: {path} holds what is a key; DVC, MLflow and reports record the settings: leave it out, and give "
                "it in an environment variable"
            )
    try:
        require_consistent(params)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return params


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield all texts of a document, each with the path of its setting."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(str(name), path)
            yield from _texts(inner, f"{path}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, path)


def load_params(workspace: Path) -> Params:
    """Return the checked params.yaml of a workspace."""
    return check_params(yaml_text.read(workspace / PARAMS_FILE), str(workspace / PARAMS_FILE))


def load_section(
    workspace: Path, section: str, model: type[Model], beside: Sequence[str] = ()
) -> Model:
    """Return one section as ``model``, with the seed from the top of the file.

    Args:
        workspace: The folder with params.yaml.
        section: Name of the section.
        model: What checks it.
        beside: Other sections that ``model`` has as fields, such as ``ppo`` for the critic's stage.
    """
    document = yaml_text.plain(yaml_text.read(workspace / PARAMS_FILE))
    values = dict(document.get(section) or {})
    if issubclass(model, StageConfig):
        values.setdefault("seed", document.get("seed", 1))
    for name in beside:
        if name in document:
            values[name] = document[name]
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(str(workspace / PARAMS_FILE), error, model, section)) from error

"""Reading and writing params.yaml: YAML 1.2 numbers (``1e-3`` is a float), comments and layout kept."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError


def _yaml() -> Any:
    """Return a reader and writer in the style in which DVC writes, so that ``dvc exp run -S`` changes no other line."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.default_flow_style = False
    return yaml


def parse(text: str, name: str) -> Any:
    """The round-trip document of ``text``; ``ConfigError`` with line and column when it is not a YAML mapping."""
    from ruamel.yaml.error import MarkedYAMLError

    try:
        document = _yaml().load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{name} is not valid YAML:{position} {error.problem or error.context}") from error
    if document is None:
        document = _yaml().load("{}")
    if not isinstance(document, dict):
        raise ConfigError(f"{name} must be a mapping of sections, not a {type(document).__name__}")
    return document


def parse_scalar(text: str) -> Any:
    """The value that ``text`` has as YAML: number, true/false, null, list or string."""
    from ruamel.yaml.error import YAMLError

    try:
        return _yaml().load(text)
    except YAMLError:
        return text


def dump(document: Any) -> str:
    """Return the YAML text of a round-trip document, with comments except those within lists, which DVC drops too."""
    stream = io.StringIO()
    _yaml().dump(_in_block_style(document), stream)
    return stream.getvalue()


def _in_block_style(document: Any) -> Any:
    """Return a copy in which every mapping and list that is not empty is written with an item per line."""
    document = copy.deepcopy(document)
    sections = [document]
    while sections:
        section = sections.pop()
        for key, value in section.items():
            if isinstance(value, list) and value:
                section[key] = plain(value)
            elif isinstance(value, dict) and value:
                if hasattr(value, "fa"):  # a mapping that was read from YAML text
                    value.fa.set_block_style()
                sections.append(value)
    return document


def read(path: Path) -> Any:
    """The document in ``path``; ``ConfigError`` when it cannot be read."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; make a workspace with `rlhf init DIR`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def plain(value: Any) -> Any:
    """A copy of a round-trip document made of plain dicts, lists and scalars."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if kind is bool else kind(value)
    return value

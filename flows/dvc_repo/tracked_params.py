"""The parameters that dvc.yaml names: DVC refuses a stage while one of them is left out of params.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import PARAMS_FILE, Params
from rlhf_core.config.stages.policy import PolicyConfig
from rlhf_core.errors import ConfigError

DVC_FILE = "dvc.yaml"


def check_tracked_params(workspace: Path) -> None:
    """Check that params.yaml has every parameter that a stage of dvc.yaml names.

    The program has defaults for them, but DVC compares what is written in the file. A file that was written before
    there was a judge is completed by the referee's settings.

    Raises:
        ConfigError: some are left out, and the message has the lines to add; or ``policy.method`` is set and a dvc.yaml
            from before there was one would not see it.
    """
    document = yaml_text.plain(yaml_text.read(workspace / PARAMS_FILE))
    tracked = tracked_params(workspace)
    method = _value_at(document, "policy.method") or PolicyConfig().method
    if method != PolicyConfig().method and not {"policy", "policy.method"} <= set(tracked):
        raise ConfigError(
            f"{workspace / PARAMS_FILE}: policy.method is {method}, but {workspace / DVC_FILE} does not name it, so "
            "that DVC would not train the policy anew; add policy.method to params of stage critic and policy to those "
            "of stage ppo, or take both from a dvc.yaml of `rlhf init DIR`"
        )
    missing = [path for path in tracked if not _has(document, path)]
    if not missing:
        return
    defaults = Params().model_dump(mode="json", by_alias=True)
    lines: dict[str, Any] = {}
    without_default = []
    for path in missing:
        value = _value_at(defaults, path)
        if _has(document, path):
            _set(lines, path, _value_at(document, path))
        elif value is None or value == []:
            without_default.append(path)
        else:
            _set(lines, path, {} if isinstance(value, dict) else value)
    message = [f"{workspace / PARAMS_FILE} leaves out parameters that {DVC_FILE} names, so DVC would refuse its stages"]
    if lines:
        message.append("add these, which are the defaults (of the judge: what the referee has), to their sections:")
        message += [f"  {line}" for line in yaml_text.dump(lines).splitlines()]
    if without_default:
        message.append(
            f"add {', '.join(without_default)}, which no default can stand for (`rlhf init DIR` has examples)"
        )
    raise ConfigError("\n".join(message))


def tracked_params(workspace: Path) -> list[str]:
    """Return the dotted names of params.yaml's parameters in dvc.yaml, each once, a section before its parts."""
    stages = yaml_text.plain(yaml_text.read(workspace / DVC_FILE)).get("stages") or {}
    return sorted({name for stage in stages.values() for name in _names_of(stage)})


def _names_of(stage: Mapping[str, Any]) -> Iterator[str]:
    """Yield a stage's parameters of params.yaml; other files are entries of their own."""
    for entry in stage.get("params") or []:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, Mapping):
            yield from entry.get(PARAMS_FILE) or []


def _has(document: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(document, Mapping) or part not in document:
            return False
        document = document[part]
    return True


def _value_at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document.get(part) if isinstance(document, Mapping) else None
    return document


def _set(lines: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        lines = lines.setdefault(part, {})
    lines[last] = value

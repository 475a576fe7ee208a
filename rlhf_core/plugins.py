"""The doors for code of others: entry points of installed distributions, by group.

A distribution names an object of its own in a group of ``pyproject.toml``, and the pipeline finds
it there without a line of its own changing. The extras of this project come through the same doors.
docs/plugins.md has an example.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, first_line

COMMANDS = "rlhf.commands"
READERS = "rlhf.readers"
RUN_LOGGERS = "rlhf.run_loggers"
REGISTRY_POLICIES = "rlhf.registry_policies"
DISTRIBUTION = "rlhf-pipeline"


class PluginError(ConfigError):
    """A plugin that is named does not exist or cannot be imported."""


@cache
def plugins_of(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name; a name that several distributions give has
    several.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def origin(entry: EntryPoint) -> str:
    """Return the name of the distribution that an entry point belongs to."""
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def load_plugin(group: str, name: str) -> Any:
    """Import the object that a distribution has entered as ``name`` in ``group``.

    Raises:
        PluginError: There is none, two distributions give this name, or its module cannot be
            imported. The message is one line, and says which distribution it is about.
    """
    entries = plugins_of(group).get(name, ())
    if not entries:
        known = ", ".join(sorted(plugins_of(group))) or "none"
        raise PluginError(f"no installed package gives {name!r} in {group}; known: {known}")
    if len(entries) > 1:
        givers = " and ".join(sorted(origin(entry) for entry in entries))
        raise PluginError(f"{givers} both give {name!r} in {group}; uninstall one of them")
    entry = entries[0]
    try:
        return entry.load()
    except Exception as error:  # whatever the code of others raises when it is imported
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise PluginError(
            f"{name} of the package {origin(entry)} cannot be imported ({entry.value}: {reason}); "
            "install that package again, or uninstall it"
        ) from error


def plugin_line(group: str, name: str) -> str:
    """Describe a plugin, without importing it, in a line that changes with its version and the file
    of its module.
    """
    entries = plugins_of(group).get(name, ())
    if not entries:
        return f"{group} {name}: not installed"
    entry = entries[0]
    version = entry.dist.version if entry.dist is not None else ""
    spec = find_spec(entry.module.partition(".")[0])
    file = None
    if spec is not None and spec.origin is not None:
        within = entry.module.split(".")[1:]
        file = (
            Path(spec.origin)
            if not within
            else Path(spec.origin).parent.joinpath(*within).with_suffix(".py")
        )
    code = (
        hashlib.sha256(file.read_bytes()).hexdigest()
        if file is not None and file.is_file()
        else "unknown"
    )
    return f"{group} {name}: {origin(entry)} {version}, {entry.value}, code {code}"

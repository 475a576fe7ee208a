"""The doors for code of others: entry points of installed distributions, by group.

A distribution names an object of its own in a group of ``pyproject.toml``, and the pipeline finds
it there without a line of its own changing. The extras of this project come through the same doors.
docs/plugins.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, RlhfError, first_line

COMMANDS = "rlhf.commands"
READERS = "rlhf.readers"
RUN_LOGGERS = "rlhf.run_loggers"
REGISTRY_POLICIES = "rlhf.registry_policies"
EVALUATIONS = "rlhf.evaluations"
JUDGES = "rlhf.judges"
SAMPLERS = "rlhf.samplers"
MODEL_READERS = "rlhf.model_readers"
REWARD_SOURCES = "rlhf.reward_sources"
DATA_REPORTS = "rlhf.data_reports"
DISTRIBUTION = "rlhf-pipeline"
# What this project's own extras enter, apart from commands.
EXTRAS = {
    DATA_REPORTS: ("card",),
    EVALUATIONS: ("opponents", "multiple_choice"),
    JUDGES: ("llm",),
    MODEL_READERS: ("gguf",),
    REGISTRY_POLICIES: ("signature",),
    RUN_LOGGERS: ("wandb",),
    SAMPLERS: ("vllm",),
}
INSTALL_AGAIN = f"install {DISTRIBUTION} again (in a checkout: make setup)"


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


def known_plugins(group: str) -> list[str]:
    """Return the names in a group, those of this project's extras even where they are missing."""
    return sorted({*EXTRAS.get(group, ()), *plugins_of(group)})


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
    if not entries and name in EXTRAS.get(group, ()):
        raise PluginError(
            f"{name} is an extra that this installation does not know; {INSTALL_AGAIN}"
        )
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


def model_plugins(source: str | Path) -> list[tuple[str, str]]:
    """Return group and name of the plugin that reads ``source``; none for a folder or a hub id."""
    suffix = Path(source).suffix.lower().removeprefix(".")
    return [(MODEL_READERS, suffix)] if suffix in known_plugins(MODEL_READERS) else []


def made_by_plugin(group: str, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a plugin's ``make`` makes of ``arguments``.

    Raises:
        PluginError: It fails otherwise than with an ``RlhfError``, which is raised as it is.
    """
    try:
        return make(*arguments)
    except RlhfError:
        raise
    except Exception as error:  # whatever the code of others raises
        raise PluginError(f"{name} of {group} cannot begin: {first_line(error)}") from error

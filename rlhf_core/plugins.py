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
FORECASTS = "rlhf.forecasts"
DISTRIBUTION = "rlhf-pipeline"
# What this project's own extras enter, apart from commands.
EXTRAS = {
    DATA_REPORTS: ("card",),
    EVALUATIONS: ("opponents", "multiple_choice"),
    FORECASTS: ("hours", "memory", "ranks"),
    JUDGES: ("llm",),
    MODEL_READERS: ("gguf",),
    REGISTRY_POLICIES: ("signature",),
    REWARD_SOURCES: ("http",),
    RUN_LOGGERS: ("wandb",),
    SAMPLERS: ("vllm",),
}
# The functions that a plugin of a group has, or what it makes: the pipeline calls all of them.
FUNCTIONS = {
    EVALUATIONS: ("measure", "replies", "metrics", "rows"),
    JUDGES: ("score or judge",),
    MODEL_READERS: ("read_config", "read_tokenizer", "read_model"),
    READERS: ("matches", "parse"),
    REGISTRY_POLICIES: (
        *("check_settings", "name_files", "before_run", "version_tags"),
        *("register_version", "verify_version", "export_folder"),
    ),
    RUN_LOGGERS: ("log_metrics", "log_params", "log_artifact", "log_datasets", "set_tags", "end"),
}
# A plugin of these groups is called: it is a class, or a function that makes what is asked for.
CALLED = (DATA_REPORTS, EVALUATIONS, FORECASTS, JUDGES, RUN_LOGGERS)
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
        PluginError: There is none, two distributions give this name, its module cannot be
            imported, or it lacks a function of its group. The message is one line, and says which
            distribution it is about.
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
        plugin = entry.load()
    # Whatever the code of others raises when it is imported, a script's exit among it.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise PluginError(
            f"{name} of the package {origin(entry)} cannot be imported ({entry.value}: {reason}); "
            "install that package again, or uninstall it"
        ) from error
    if group in CALLED and not callable(plugin):
        raise PluginError(f"{described(group, name)} is a {type(plugin).__name__}, not a function")
    if group not in CALLED or isinstance(plugin, type):
        require_functions(group, name, plugin)
    return plugin


def require_functions(group: str, name: str, plugin: Any) -> None:
    """Refuse a plugin, or what it has made, that lacks a function of its group.

    Raises:
        PluginError: It lacks one. The message names it.
    """
    for function in FUNCTIONS.get(group, ()):
        choices = function.split(" or ")
        if not any(callable(getattr(plugin, choice, None)) for choice in choices):
            raise lacks(group, name, function)


def lacks(group: str, name: str, function: str) -> PluginError:
    """Return the error of a plugin that lacks a function."""
    return PluginError(
        f"{described(group, name)} has no {function}, which {group} needs (docs/plugins.md); "
        "correct that package, or leave it out of the settings"
    )


def described(group: str, name: str) -> str:
    """Return what messages call a plugin: its name, its package and its object."""
    entry = plugins_of(group)[name][0]
    return f"{name} of the package {origin(entry)} ({entry.value})"


def model_plugins(source: str | Path) -> list[tuple[str, str]]:
    """Return group and name of the plugin that reads ``source``; none for a folder or a hub id."""
    suffix = Path(source).suffix.lower().removeprefix(".")
    return [(MODEL_READERS, suffix)] if suffix in known_plugins(MODEL_READERS) else []


def made_by_plugin(group: str, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a plugin's ``make`` makes of ``arguments``.

    Raises:
        PluginError: It fails otherwise than with an ``RlhfError``, which is raised as it is, or
            what it makes lacks a function of the group.
    """
    try:
        made = make(*arguments)
    except RlhfError:
        raise
    except (Exception, SystemExit) as error:  # whatever the code of others raises
        raise PluginError(f"{name} of {group} cannot begin: {first_line(error)}") from error
    require_functions(group, name, made)
    return made

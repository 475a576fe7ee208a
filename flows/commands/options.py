"""Options that several commands share, and the text of ``--help`` with the list of profiles."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from flows.workspace import find_workspace
from rlhf_core.commands.plugged import PluggedGroup
from rlhf_core.config.recipe import profile_headers, profiles_of, recipe_folder
from rlhf_core.errors import RlhfError

OPTION = ("--workspace", "-w")
OPTION_HELP = "The workspace; default: the nearest at or above the current folder."
AnyFolder = Annotated[Path | None, typer.Option(*OPTION, help=OPTION_HELP)]
Workspace = Annotated[Path, typer.Option(*OPTION, help=OPTION_HELP, callback=find_workspace)]
NEAREST: Any = (
    None  # the default of a ``Workspace``: the nearest one at or above the current folder
)
Reason = Annotated[
    str | None, typer.Option("--reason", help="The reason; recorded with the decision.")
]


def joined_lines(text: str) -> str:
    """Join the lines of each paragraph, except those of shell commands, which start with a $."""
    return re.sub(r"(?<=[^\n])\n(?!\n|\$ |\Z)", " ", text)


def profile_names(incomplete: str = "") -> list[str]:
    """Return the profiles that start with ``incomplete``, for completion in a shell."""
    earlier, comma, last = incomplete.rpartition(",")
    names = [name for name in profile_headers(_profiles_folder()) if name.startswith(last)]
    return [f"{earlier}{comma}{name}" for name in names]


def profile_list() -> str:
    """List the profiles of the current workspace, else of the project, with a sentence on each."""
    headers = profile_headers(_profiles_folder())
    width = max((len(name) for name in headers), default=0)
    lines = ["Profiles (--profile):"]
    for name, header in headers.items():
        sentence = header.partition(". ")[0].rstrip(".")
        lines.append(f"  {name.ljust(width)}  {sentence}")
    return "\n".join(lines)


def _profiles_folder() -> Path:
    try:
        return profiles_of(find_workspace())
    except RlhfError:
        return profiles_of(recipe_folder())


class CommandWithProfiles(TyperCommand):
    """A command whose help ends with the list of profiles."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; the profiles are read now, not when the command line starts."""
        self.epilog = profile_list()
        super().format_help(ctx, formatter)


# The commands that the help shows, in panels and in this order; others, such as old names, are
# hidden.
PANELS = {
    "Start": ("init", "data", "doctor", "config"),
    "Train": ("run", "stage", "status", "logs", "up", "deploy"),
    "Judge": ("report", "gate", "evaluate"),
    "Release": ("promote", "approve", "decline", "rollback", "history", "registry"),
}


class Commands(PluggedGroup):
    """All commands, in panels; those of plugins come last.

    Help texts have no line breaks within a paragraph; that of the whole lists profiles.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        panels: dict[str, str] = {}
        for panel, names in PANELS.items():
            panels |= dict.fromkeys(names, panel)
        in_panels = {name: self.commands[name] for name in panels if name in self.commands}
        self.commands = {**in_panels, **self.commands}
        join_help_lines(self)
        for name, listed in self.commands.items():
            setattr(listed, "rich_help_panel", panels.get(name))  # noqa: B010 - of both kinds of commands
            listed.hidden = name not in panels

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, whose help is to be read on a terminal."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            within = type(ctx)(command, info_name=cmd_name, parent=ctx)
            if isinstance(command, PluggedGroup):
                command.mount_plugins(within)
            join_help_lines(command)
            plain_parameters(command, within)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; the profiles are read now, not when the command line starts."""
        plain_parameters(self, ctx)
        self.epilog = profile_list()
        super().format_help(ctx, formatter)


def join_help_lines(command: Any) -> None:
    """Join the lines within paragraphs of the help of a command and of its own."""
    command.help = joined_lines(command.help or "")
    for member in getattr(command, "commands", {}).values():
        join_help_lines(member)


def plain_parameters(command: Any, ctx: Any) -> None:
    """Show flags without a type, and arguments without braces, in the help of a command."""
    for parameter in command.get_params(ctx):
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
        if isinstance(parameter, TyperArgument):
            shown = (parameter.metavar or parameter.name or "").upper()
            if parameter.nargs != 1:
                shown += "..."
            pieces = [shown if parameter.required else f"[{shown}]"]
            vars(parameter)["get_usage_pieces"] = partial(lambda usage, _: usage, pieces)
    for member_name, member in getattr(command, "commands", {}).items():
        plain_parameters(member, type(ctx)(member, info_name=member_name, parent=ctx))

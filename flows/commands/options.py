"""Options that several commands share, and the text of ``--help`` with the list of profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flows.workspace.folder import find_workspace
from rlhf_core.config.recipe import profile_headers, profiles_of, recipe_folder
from rlhf_core.errors import RlhfError

Workspace = Annotated[
    Path | None, typer.Option("--workspace", "-w", help="Folder with params.yaml; default: the current one.")
]
Reason = Annotated[str | None, typer.Option("--reason", help="The reason; recorded with the decision.")]


COMMAND = "$ "


def joined_lines(text: str) -> str:
    """Join the lines of each paragraph, except shell commands, which start with a dollar sign and keep their lines."""
    joined: list[str] = []
    for line in text.splitlines():
        if joined and joined[-1] and line and not line.startswith(COMMAND):
            joined[-1] = f"{joined[-1]} {line}"
        else:
            joined.append(line)
    return "\n".join(joined)


def profile_names(incomplete: str = "") -> list[str]:
    """Return the names of the profiles that start with ``incomplete``, for completion in a shell."""
    return [name for name in profile_headers(_profiles_folder()) if name.startswith(incomplete)]


def profile_list() -> str:
    """List the profiles of the current workspace, else of the project, with the first sentence of each."""
    headers = profile_headers(_profiles_folder())
    width = max((len(name) for name in headers), default=0)
    lines = [f"  {name.ljust(width)}  {header.partition('. ')[0].rstrip('.')}" for name, header in headers.items()]
    return "\n".join(["Profiles (--profile):", *lines])


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


class Commands(TyperGroup):
    """All commands: their help texts have no line breaks within a paragraph, the group's ends with the profiles."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        waiting: list[Any] = [self]
        while waiting:
            command = waiting.pop()
            command.help = joined_lines(command.help or "")
            waiting += getattr(command, "commands", {}).values()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; the profiles are read now, not when the command line starts."""
        self.epilog = profile_list()
        super().format_help(ctx, formatter)

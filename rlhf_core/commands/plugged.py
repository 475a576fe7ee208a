"""Groups of commands that installed packages add to: entry points of ``rlhf.commands``.

An entry point is called COMMAND, or GROUP.COMMAND within a group, and is a ``typer.Typer``. It is
imported when its command runs or its group shows its help, so its module must be light.
"""

from __future__ import annotations

from typing import Any, NoReturn

import typer.main
from typer.core import TyperCommand, TyperGroup

from rlhf_core.plugins import (
    COMMANDS,
    DISTRIBUTION,
    INSTALL_AGAIN,
    PluginError,
    described,
    lacks,
    load_plugin,
    origin,
    plugins_of,
)

PANEL = "Extras"
# The commands that this project's own extras bring, in the order of the help.
EXTRAS = (
    "chat",
    "plan",
    "compare",
    "annotate",
    "serve",
    "export",
    "gc",
    "data.inspect",
    "data.validate",
    "data.convert",
    "data.diff",
    "evaluate.benchmark",
    "evaluate.lm-eval",
    "registry.gc",
)
NOT_REGISTERED = (
    f"`rlhf {{command}}` is an extra that this installation does not know; {INSTALL_AGAIN}"
)


class PluggedGroup(TyperGroup):
    """A group of commands, with those that plugins enter in it.

    Attributes:
        prefix: What the names of its entry points begin with, such as ``data.``; empty for the
            whole command line.
    """

    prefix = ""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the group's own commands, of extras, and of other packages."""
        own = super().list_commands(ctx)
        plugged = [
            path.removeprefix(self.prefix)
            for path in (*EXTRAS, *sorted(plugins_of(COMMANDS)))
            if path.startswith(self.prefix)
        ]
        names = [*own, *(name for name in plugged if "." not in name)]
        return list(dict.fromkeys(names))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command of the group's own, else the plugin's of this name, else None."""
        if cmd_name not in self.commands:
            plugged = plugged_command(self.prefix + cmd_name)
            if plugged is None:
                return None
            self.commands[cmd_name] = plugged
        return super().get_command(ctx, cmd_name)

    def mount_plugins(self, ctx: Any) -> None:
        """Import the plugins of this group, so that ``commands`` has all of them."""
        for name in self.list_commands(ctx):
            self.get_command(ctx, name)


def plugged_command(path: str) -> Any:
    """Return the command that a plugin has entered as ``path``.

    One that cannot be imported says so when it is run.
    """
    words = path.replace(".", " ")
    entries = plugins_of(COMMANDS).get(path)
    if entries is None:
        return _unusable(path, NOT_REGISTERED.format(command=words)) if path in EXTRAS else None
    try:
        app = plugged_app(path)
    except PluginError as error:
        return _unusable(path, str(error))
    command: Any = typer.main.get_command(app)
    command.name = path.rpartition(".")[2]
    ours = origin(entries[0]) == DISTRIBUTION
    command.rich_help_panel = PANEL if ours else f"From the package {origin(entries[0])}"
    return command


def plugged_app(path: str) -> typer.Typer:
    """Import what a plugin has entered as the command ``path``.

    Raises:
        PluginError: It cannot be imported, or is no command.
    """
    app = load_plugin(COMMANDS, path)
    if not isinstance(app, typer.Typer):
        raise PluginError(f"{described(COMMANDS, path)} is no typer.Typer")
    if not (app.registered_commands or app.registered_groups or app.registered_callback):
        raise lacks(COMMANDS, path, "command")
    return app


def _unusable(path: str, problem: str) -> TyperCommand:
    """Make a command that fails with ``problem``, whatever its arguments, and shows it as help."""

    def refuse() -> NoReturn:
        raise PluginError(problem)

    taken = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    name = path.rpartition(".")[2]
    return TyperCommand(
        name,
        callback=refuse,
        help=problem,
        context_settings=taken,
        rich_help_panel=PANEL,
        rich_markup_mode=None,
    )

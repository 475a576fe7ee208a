"""The group ``rlhf data``, whose commands are extras, and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_core.commands.plugged import PluggedGroup

SHORT_FORM = "inspect"
HELP_OPTIONS = ("-h", "--help")


class DataGroup(PluggedGroup):
    """The group ``rlhf data``; without a command, its arguments are those of ``inspect``."""

    prefix = "data."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``rlhf data FILES`` as ``rlhf data inspect FILES``.

        A file named like a command needs ``./``.
        """
        if args and args[0] not in self.list_commands(ctx) and args[0] not in HELP_OPTIONS:
            args = [SHORT_FORM, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DataGroup, no_args_is_help=True, rich_markup_mode="rich")

ProbeOption = Annotated[
    bool,
    typer.Option(
        "--probe/--no-probe", help="Try passes for seconds, to forecast how long a run takes."
    ),
]
WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        "--workspace",
        "-w",
        help="The workspace; default: the nearest at or above the current folder.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback()
def data() -> None:
    """Look at data files, check and convert them, without a pipeline.

    `rlhf data FILES` is short for `rlhf data inspect FILES`.
    """


def print_text(text: str, *, err: bool = False) -> None:
    """Print lines that quote others, with control characters of theirs as escapes.

    Args:
        err: Print on standard error.
    """
    from rlhf_core.data.text import for_terminal

    typer.echo(for_terminal(text), err=err)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON, control characters in texts escaped."""
    import json
    import re

    text = json.dumps(value, ensure_ascii=False, indent=2)
    typer.echo(re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text))

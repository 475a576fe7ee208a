"""``rlhf gc``: what a workspace keeps that nothing needs. Heavy imports wait until it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.commands.options import NEAREST, Workspace
from rlhf_core.runtime.progress import busy

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def gc(
    workspace: Workspace = NEAREST,
    days: Annotated[int, typer.Option(min=0, help="What was not used for so many days goes.")] = 30,
    yes: Annotated[bool, typer.Option("--yes", help="Delete what goes, without asking.")] = False,
) -> None:
    """List what a workspace keeps that nothing needs any more, or delete it.

    That is: partial states of earlier settings, and trials (`rlhf run --profile`, `--set`), that were not
    used for long and of which no registered version has an alias. The DVC cache is left to `dvc gc`.
    While a run or a stage works there, nothing is deleted.

    Examples:
    $ rlhf gc
    $ rlhf gc --days 7 --yes
    """
    with busy("looking through partial states and trials"):
        from flows.commands.text import print_rows, unlabelled
        from rlhf_extras.retention.workspace import collect_garbage, garbage_text

        found = collect_garbage(workspace, days=days, delete=yes)
        text = garbage_text(workspace, found, deleted=yes)
    print_rows(unlabelled(text.splitlines()))

"""``rlhf export``: a registered policy as a folder with a card. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import NEAREST, Reason, Workspace
from rlhf_core.commands.data import print_text
from rlhf_core.errors import RlhfError
from rlhf_core.runtime.progress import busy

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def export(
    target: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write; it must be new or empty.")
    ],
    version: Annotated[
        str | None, typer.Option("--version", help="The version; default: the champion.")
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", help="Push to owner/name on a hub; needs HF_TOKEN.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    license_id: Annotated[
        str | None, typer.Option("--license", help="License on the card, such as apache-2.0.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapter that was trained, for PEFT.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Release an ungated version; needs --reason.")
    ] = False,
    reason: Reason = None,
    workspace: Workspace = NEAREST,
) -> None:
    """Write a registered policy as a Hugging Face folder, with a card of its gates, judges, lineage
    and limits.

    Exit codes: 0 done, 3 its gates did not pass or it was rolled back or declined, 2 it could not
    be written or pushed.

    Examples:
    $ rlhf export my-model
    $ rlhf export my-model --push my-team/my-model --license apache-2.0
    """
    if force and not (reason or "").strip():
        raise RlhfError("a forced release needs a reason; add --reason TEXT, the card shows it")
    with busy("writing the model and its card"):
        from rlhf_extras.release.export import export as write

        done = write(
            workspace,
            target,
            version=version,
            push=push,
            public=public,
            license_id=license_id,
            force_reason=reason if force else None,
            adapter=adapter,
        )
    print_text(done.describe())

"""``rlhf registry gc``: list what registry.retention does not keep, and delete it. Heavy imports
wait until it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.commands.options import NEAREST, Workspace
from rlhf_core.runtime.progress import busy

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def gc(
    workspace: Workspace = NEAREST,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is listed instead of only listing it.")
    ] = False,
) -> None:
    """List the registered versions and matches that registry.retention does not keep, and why the
    others stay.

    registry.retention.versions says how many of the newest stay; unless it is set, all do. Nothing
    that an alias, a rollback or an approval needs is deleted. The runs that registered the deleted
    versions stay, with metrics, gates and reports, and the deletion is an entry of `rlhf history`.
    Listed too are token ids that are kept of data that changed, or that no stage has read for 30
    days, and the model files and open runs that killed registrations have left.

    Examples:
    $ rlhf registry gc
    $ rlhf registry gc --delete
    """
    with busy("looking through versions, matches and token ids"):
        from flows.commands.text import print_rows, unlabelled
        from rlhf_extras.retention.retention import apply_retention
        from rlhf_extras.retention.token_ids import clean_token_cache

        kept = apply_retention(workspace, delete=delete).describe(done=delete)
        lines = [kept, *clean_token_cache(workspace, delete=delete)]
    print_rows(unlabelled("\n".join(lines).splitlines()))

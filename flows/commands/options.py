"""Options that several commands of the command line share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workspace = Annotated[
    Path | None, typer.Option("--workspace", "-w", help="Folder with params.yaml; default: the current one.")
]
Reason = Annotated[str | None, typer.Option("--reason", help="The reason; recorded with the decision.")]

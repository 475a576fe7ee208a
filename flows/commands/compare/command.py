"""The command ``rlhf compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.commands.data import JsonOption
from rlhf_core.commands.output import print_json, terminal_width
from rlhf_core.errors import RlhfError

app = typer.Typer(add_completion=False)


@app.command(no_args_is_help=True)
def compare(
    workspaces: Annotated[list[Path], typer.Argument(help="Folders of finished runs.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the results here, for a workspace's report to show.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare finished runs: judges, KL, perplexity, cost, gates and registered version in one table.

    Nothing is computed: the table has what the workspaces hold on disk. A warning says where runs were judged on other
    prompts, by another judge, or against another SFT model. Best of n is a column of its own where it was evaluated.

    Examples:
    $ rlhf compare ws-ppo ws-dpo
    $ rlhf compare workspaces/* --json
    $ rlhf compare . workspaces/demo-* --output alternatives.json
    """
    from dataclasses import asdict

    from flows.commands.compare.comparability import comparability_warnings
    from flows.commands.compare.results import EvaluatedWorkspace, read_workspace
    from flows.commands.error_text import error_console, print_error

    read: list[EvaluatedWorkspace] = []
    for folder in workspaces:
        try:
            read.append(read_workspace(folder))
        except RlhfError as error:
            print_error(f"left out: {error}", sys.stderr)
    if not read:
        raise RlhfError("none of these folders has an evaluated policy")
    warnings = comparability_warnings(read)
    if output is not None:
        from flows.commands.compare.alternatives_file import write_alternatives

        write_alternatives(output, read)
    results = [result for workspace in read for result in workspace.results]
    if as_json:
        print_json({"runs": [asdict(result) for result in results], "warnings": warnings})
        return
    from rich.console import Console

    from flows.commands.compare.table import results_table

    console = Console(highlight=False, width=terminal_width())
    console.print(results_table(results, console.width))
    for warning in warnings:
        error_console(sys.stderr).print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if output is not None:
        typer.echo(f"wrote {output}; the next `rlhf run` of the workspace whose report.alternatives it is shows it")

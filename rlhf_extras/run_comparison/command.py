"""``rlhf compare``: finished runs side by side. Heavy imports wait until it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.commands.data import JsonOption, print_json, print_text
from rlhf_core.errors import RlhfError
from rlhf_core.runtime.progress import busy
from rlhf_extras.data_files.options import terminal_width

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(no_args_is_help=True)
def compare(
    workspaces: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", help="Also write what --json prints to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare finished runs: the settings that differ, then judges, KL, perplexity, cost, gates and
    registered version.

    Nothing is computed: the table has what the workspaces hold on disk. A warning says where runs
    were judged on other prompts, by another judge, or against another SFT model. Best of n is a
    column of its own where it was evaluated.

    Examples:
    $ rlhf compare ws-ppo ws-dpo
    $ rlhf compare workspaces/* --json
    $ rlhf compare . workspaces/demo-* --output results.json
    """
    with busy("reading the runs"):
        from flows.commands.text import PlainConsole, print_error
        from rlhf_extras.run_comparison.compare import (
            EvaluatedWorkspace,
            RunComparison,
            read_workspace,
            results_table,
            write_results,
        )

        read: list[EvaluatedWorkspace] = []
        for folder in workspaces:
            try:
                read.append(read_workspace(folder))
            except RlhfError as error:
                print_error(f"left out: {error}", sys.stderr)
        if not read:
            raise RlhfError("none of these folders has an evaluated policy")
        comparison = RunComparison.of(read)
    if output is not None:
        write_results(output, comparison.as_dict())
    if as_json:
        print_json(comparison.as_dict())
        return
    console = PlainConsole(sys.stdout, terminal_width())
    console.print(results_table(comparison, console.width))
    for warning in comparison.warnings:
        PlainConsole(sys.stderr).print(
            f"warning: {warning}", style="yellow", soft_wrap=not sys.stderr.isatty()
        )
    if output is not None:
        print_text(f"wrote {output}")

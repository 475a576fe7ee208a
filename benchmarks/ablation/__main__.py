"""``python -m benchmarks.ablation``, or ``rlhf ablate`` in a checkout: train the variants and judge
the claims.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.ablation.page import write_page
from benchmarks.ablation.run import (
    AblationRequest,
    ablate,
    definition,
    listing,
    parse_names,
    parse_seeds,
)
from benchmarks.ablation.verdicts import read_csv
from flows.commands.options import AnyFolder, CommandWithProfiles, profile_names
from flows.workspace import find_workspace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(cls=CommandWithProfiles)
def study(
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            help="Overlay on params.yaml, such as smoke.",
            autocompletion=profile_names,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", help="section.key=value, overrides params.yaml; may be repeated."
        ),
    ] = None,
    workspace: AnyFolder = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Variants and claims; default: the workspace's ablation.yaml, else the study's."
        ),
    ] = None,
    variants: Annotated[str | None, typer.Option(help="Only these, separated by commas.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="These seeds, separated by commas; default: the file's.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="PPO iterations; default: the file's.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; default: one per core.")
    ] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="Show variants and figures, run nothing.")
    ] = False,
    tables_of: Annotated[
        Path | None,
        typer.Option("--tables", help="Print claims and tables of a results.csv, run nothing."),
    ] = None,
) -> None:
    """Train every variant of PPO with every seed, and check which of the paper's claims hold here.

    Each run has a workspace under workspaces/ablation. What is up to date is not run again, so that
    a call after an interruption resumes. The results (table.md, results.csv, figures) go to
    ablation/demo, those of a part to ablation/demo-part.
    """
    overrides = [*(sets or []), *([f"ppo.iterations={iterations}"] if iterations else [])]
    request = AblationRequest(
        profile, tuple(overrides), file, parse_names(variants), parse_seeds(seeds)
    )
    folder = find_workspace(workspace)
    if only_list:
        typer.echo(listing(folder, request))
        return
    if tables_of is not None:
        results = [r for r in read_csv(tables_of) if request.includes(r.run)]
        typer.echo(write_page(definition(folder, request), results, {}), nl=False)
        return
    raise typer.Exit(ablate(folder, request, jobs))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.ablation")

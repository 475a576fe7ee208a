"""The commands ``rlhf annotate …``, which ask people which of two replies is better.

Heavy imports wait until one runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.commands.data import WorkspaceOption, print_json, print_text
from rlhf_core.errors import RlhfError
from rlhf_core.runtime.progress import busy

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def annotate() -> None:
    """Ask people which of two replies is better: export pairs blind, import their answers."""


@app.command(no_args_is_help=True)
def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write; it must be new or empty.")
    ],
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sample replies to so many training prompts; default: take the evaluation's.",
        ),
    ] = None,
    replies: Annotated[
        int, typer.Option(min=1, help="With --prompts: replies of each model to a prompt.")
    ] = 1,
    bad_cases: Annotated[
        int | None, typer.Option(min=0, help="At most so many bad cases; default: all.")
    ] = None,
    control: Annotated[
        int | None,
        typer.Option(min=0, help="Pairs drawn at random; default: as many as bad cases."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides draw, order and sides.")] = 1,
    workspace: WorkspaceOption = None,
) -> None:
    """Write pairs of replies of SFT and policy for people to compare, without a word about who
    wrote which.

    The pairs are bad cases, where the reward model prefers the policy's reply and the judge SFT's,
    and a random control beside them. DIR gets pairs.jsonl, pairs.csv, and tasks and configuration
    for Label Studio; each annotator fills in a copy of one of them. What they do not see stays in
    data/annotations/exports of the workspace.

    The evaluation's pairs are on test prompts: they judge, and can train nothing. For pairs that
    the next round trains on, name --prompts; --replies finds more bad cases where the training
    prompts are few.

    Examples:
    $ rlhf annotate export to-annotate
    $ rlhf annotate export to-annotate --prompts 2000 --bad-cases 200 --control 100
    """
    if prompts is None and replies > 1:
        raise RlhfError("--replies needs --prompts: the evaluation's replies are sampled already")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RlhfError(f"{folder} exists already; name a new or empty folder")
    with busy("choosing the pairs"):
        from rlhf_core.stages.runtime.runner import workspace_root
        from rlhf_core.storage.garbage_collection import skip_last_collection

        skip_last_collection()
        root = workspace_root(workspace)
        from rlhf_extras.annotation import human_pairs

        candidates, bad = (
            human_pairs.evaluated_candidates(root)
            if prompts is None
            else human_pairs.sampled_candidates(root, prompts, replies)
        )
        exported = human_pairs.blinded_export(candidates, bad[:bad_cases], control, seed)
        exported.save_key(root)
        human_pairs.write_forms(exported.pairs, folder)
    bad_ones = sum(pair.bad_case for pair in exported.pairs)
    controls = sum(pair.control for pair in exported.pairs)
    both = bad_ones + controls - len(exported.pairs)
    shared = f", {both} of them both" if both else ""
    print_text(
        f"{len(exported.pairs)} pairs in {folder}: {bad_ones} bad cases, {controls} of the control{shared}"
    )
    print_text(f"the answers come back with: rlhf annotate import FILE... (export {exported.name})")


@app.command("import", no_args_is_help=True)
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(help="Filled .jsonl or .csv files, or Label Studio's .json export."),
    ],
    annotator: Annotated[
        str | None,
        typer.Option(
            help="Who filled them; default: their column annotator, else the file's name."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take back what the same annotators answered before.")
    ] = False,
    workspace: WorkspaceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Read filled files: how far annotators agree, the human win rate, and preference pairs for the
    next round.

    Files may be half filled and imported again; what an annotator answered in two ways is left out
    and said. Every answer is kept in data/annotations/exports. The majority's choices become pairs
    in data/annotations/*.jsonl, which the next run collects.

    Examples:
    $ rlhf annotate import alice.csv bob.csv
    $ rlhf annotate import project-1.json --replace
    """
    with busy("reading the answers"):
        from rlhf_core.stages.runtime.runner import workspace_root

        root = workspace_root(workspace)
        from rlhf_extras.annotation.human_answers import as_text, import_answers

        imported = import_answers(root, files, annotator, replace)
    if as_json:
        print_json(imported)
    else:
        print_text(as_text(imported))

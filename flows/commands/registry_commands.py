"""The commands about evidence and registered models. Heavy imports are deferred."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import NEAREST, Reason, Workspace
from rlhf_core.commands.data import JsonOption, print_json, print_text
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_NOT_PROMOTED, EXIT_OK, RlhfError
from rlhf_core.runtime.progress import busy

if TYPE_CHECKING:
    from rich.console import Group

PIPED_WIDTH = 1000  # no line of a table is longer
app = typer.Typer(add_completion=False)


@app.command()
def promote(
    workspace: Workspace = NEAREST,
    version: Annotated[
        str | None,
        typer.Option("--version", help="The version to promote; default: the challenger."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Promote regardless of gates and match; needs --reason.")
    ] = False,
    reason: Reason = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide, but change nothing.")] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show every criterion, its margin, and which of them decided."
        ),
    ] = False,
) -> None:
    """Promote the challenger if every judge prefers it to the champion and it is worse in nothing
    that counts.

    With registry.approval it then waits for `rlhf approve`.

    Exit codes: 0 it is champion now (in a dry run: it would be), 5 not promoted, or not before it
    is approved, 2 it could not be decided.

    Examples:
    $ rlhf promote --dry-run --explain
    $ rlhf promote --force --reason "champion was trained on leaked data"
    """
    with busy("comparing challenger and champion"):
        from flows.registry.promote import promote as decide

        decision = decide(
            workspace,
            version=version,
            force_reason=reason or "" if force else None,
            dry_run=dry_run,
        )
    print_text(decision.describe())
    if not dry_run:
        _refresh_release_page(workspace)
    if explain:
        from flows.commands.registry_output import explain_promotion

        _print(explain_promotion(decision))
    raise typer.Exit(EXIT_OK if decision.is_champion else EXIT_NOT_PROMOTED)


def _print(explained: Group) -> None:
    """Print a table and its reasons; only a terminal wraps or pads them."""
    from flows.commands.text import PlainConsole

    if sys.stdout.isatty():
        PlainConsole(sys.stdout).print(explained)
        return
    console = PlainConsole(io.StringIO(), PIPED_WIDTH)
    with console.capture() as captured:
        console.print(explained)
    print_text("\n".join(line.rstrip() for line in captured.get().splitlines()))


VersionLookedAt = Annotated[
    str | None,
    typer.Option("--version", help="The version you have looked at; another one is refused."),
]


@app.command()
def approve(
    version: VersionLookedAt = None, reason: Reason = None, workspace: Workspace = NEAREST
) -> None:
    """Make the version that passed its match and waits for approval the champion.

    RLHF_ACTOR names who decides, such as the person behind a CI job; default: the user and the
    host. The decision becomes an entry of `rlhf history`.

    Example: rlhf approve --version 7 --reason "read 50 replies"
    """
    _answer(workspace, approves=True, reason=reason or "", version=version)


@app.command()
def decline(
    reason: Annotated[
        str, typer.Option("--reason", help="The reason; recorded with the decision.")
    ],
    version: VersionLookedAt = None,
    workspace: Workspace = NEAREST,
) -> None:
    """Refuse the version that waits for approval. The champion stays; only `rlhf promote --force`
    asks again.

    Example: rlhf decline --reason "refuses too much"
    """
    if not reason.strip():
        raise RlhfError("declining needs a reason; add --reason TEXT, it is recorded")
    _answer(workspace, approves=False, reason=reason, version=version)


def _answer(workspace: Path, *, approves: bool, reason: str, version: str | None) -> None:
    """Fill in the form of the request for approval, and print what was decided."""
    with busy("deciding on the request"):
        from flows.pipeline.registration import Approval, answer_request
        from flows.workspace import actor

        answer = Approval(approve=approves, decided_by=actor(), reason=reason)
        decided = answer_request(workspace, answer, version)
    print_text(decided)
    _refresh_release_page(workspace)


def _refresh_release_page(workspace: Path) -> None:
    """Bring the workspace's page up to date after a decision, which stands in any case."""
    from flows.registry.release_page import try_release_page

    if problem := try_release_page(workspace)[1]:
        print_text(problem, err=True)


@app.command()
def rollback(
    reason: Annotated[
        str, typer.Option("--reason", help="The reason; recorded with the decision.")
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", help="Version of an earlier champion; default: the previous one."),
    ] = None,
    workspace: Workspace = NEAREST,
) -> None:
    """Restore the previous champion. A second rollback goes back one champion further.

    Examples:
    $ rlhf rollback --reason "rude replies seen in production"
    $ rlhf rollback --to 3 --reason "drifted since"
    """
    with busy("restoring the champion"):
        from flows.registry.promote import rollback as restore

        decision = restore(workspace, reason, to)
    print_text(f"champion is version {decision.champion} again (was {decision.replaced})")
    _refresh_release_page(workspace)


@app.command()
def terms(workspace: Workspace = NEAREST) -> None:
    """Show who owns the registered policy, and what a promotion by this workspace requires.

    The first promotion makes its workspace the owner: only there versions become champion, by its
    own settings.

    Example: rlhf registry terms
    """
    with busy("reading the registered policy"):
        from flows.commands.registry_output import describe_terms
        from flows.commands.text import print_rows, unlabelled

        lines = describe_terms(workspace).splitlines()
    print_rows(unlabelled(lines))


@app.command()
def history(
    workspace: Workspace = NEAREST,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Name of a registered model; default: the workspace's policy."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who made which version champion or challenger, when, why and by what evidence.

    RLHF_ACTOR names who acts, such as the person behind a CI job; default: the user and the host.

    Example: rlhf history
    """
    with busy("reading the history"):
        from flows.commands.registry_output import history_rows, model_history
        from flows.commands.text import print_rows, without_secrets

        state = model_history(workspace, model)
    if as_json:
        champions = {"champion": state.champion, "recorded_champion": state.recorded_champion}
        print_json(without_secrets({"model": state.name, "decisions": state.entries, **champions}))
    else:
        print_rows(history_rows(state))


@app.command()
def gate(
    name: Annotated[str, typer.Argument(help="data, sft, reward or policy.")] = "policy",
    workspace: Workspace = NEAREST,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show every condition with its reason, and what it was read from."
        ),
    ] = False,
    power: Annotated[
        bool,
        typer.Option(
            "--power", help="Say which win rates and margins the last evaluation can show."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a gate of the last run passed. Nothing is judged anew.

    Exit codes: 0 passed, or with --power all can be shown; 3 failed, or one cannot; 2 it has not
    been judged.

    Example: rlhf gate policy --explain
    """
    from dataclasses import asdict

    from flows.commands.registry_output import explain_gate, judged_gate

    if power:
        from rlhf_core.evaluation.losses import describe_power, power_of

        with busy("reading the evaluation"):
            rows = power_of(workspace)
        if as_json:
            print_json([asdict(row) for row in rows])
        else:
            print_text(describe_power(rows))
        suffices = all(row.suffices for row in rows)
        raise typer.Exit(EXIT_OK if suffices else EXIT_GATE_FAILED)
    report = judged_gate(workspace, name)
    if as_json:
        print_json(report.as_dict())
    else:
        print_text(report.describe())
    if explain and not as_json:
        _print(explain_gate(workspace, report))
    raise typer.Exit(EXIT_OK if report.passed else EXIT_GATE_FAILED)

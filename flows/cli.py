"""The ``rlhf`` command line: the pipeline and the core's commands, with heavy imports deferred."""

from __future__ import annotations

import os
import sys
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer

from flows.commands import registry_commands
from flows.commands.failures import DEBUG, check_streams, report_error
from flows.commands.options import (
    NEAREST,
    AnyFolder,
    Commands,
    CommandWithProfiles,
    Workspace,
    profile_names,
)
from rlhf_core import __version__
from rlhf_core import cli as core
from rlhf_core.commands.data import JsonOption, ProbeOption, print_json, print_text
from rlhf_core.commands.plugged import PluggedGroup
from rlhf_core.errors import (
    EXIT_OK,
    EXIT_USER_ERROR,
    DataError,
    RlhfError,
)
from rlhf_core.redaction import redacted
from rlhf_core.runtime.progress import busy

app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""From preference data to a promoted policy.

    Start with [bold]rlhf run[/bold]: it brings the whole pipeline up to date and prints where the report is.
    Run it again, and only what has changed is computed.

    To try other settings without editing the recipe: [bold]rlhf run --profile smoke[/bold]

    Exit codes of every command: 0 done, 1 crashed, 2 wrong input or settings, 130 stopped. The help of a command
    names its others.

    Add [bold]--debug[/bold] to any command for a traceback.""",
)
Profiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        "-p",
        help="Overlay on params.yaml, such as smoke; several: own-data,8x80gb.",
        autocompletion=profile_names,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="section.key=value, overrides params.yaml; may be repeated."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlhf-pipeline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options that stand before the command; the help of the whole is that of ``app``."""


@app.command(cls=CommandWithProfiles)
def run(
    profiles: Profiles = None,
    sets: Sets = None,
    workspace: Workspace = NEAREST,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a run that is under way instead of failing.")
    ] = False,
    promote: Annotated[
        bool, typer.Option(help="Let the new policy play against the champion at the end.")
    ] = True,
    port: Annotated[
        int | None, typer.Option(help="Port of the embedded Prefect server; default: a free one.")
    ] = None,
) -> None:
    """Run the whole pipeline: skip what is up to date, resume what was interrupted.

    With --profile or --set the run has a workspace of its own under workspaces/ (the same for the
    same settings).

    Exit codes: 0 done, 1 a stage crashed or nothing could be registered, 2 wrong input or settings,
    3 a gate failed, 4 training paused, 75 preempted too often, 130 stopped.

    Examples:
    $ rlhf run
    $ rlhf run --profile smoke
    $ rlhf run --set ppo.kl.coefficient=0.1 --set seed=2
    """
    profile = ",".join(profiles or ())
    with busy("making the workspace" if profile or sets else "starting"):
        from flows.commands.run import run as run_pipeline
        from flows.dvc_repo.recipe import trial_workspace
        from flows.prefect_server.services import check_port_option

        check_port_option(port)
        if profile or sets:
            workspace = trial_workspace(workspace, profile or None, sets or [])
    if profile or sets:
        print_text(f"workspace {workspace}")
    raise typer.Exit(run_pipeline(workspace, promote, wait, port))


@app.command()
def up(
    workspace: Workspace = NEAREST,
    port: Annotated[
        int | None, typer.Option(help="Port of the Prefect server; default: a free one.")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(help="Port of the MLflow UI; default: a free one.")
    ] = None,
) -> None:
    """Keep the Prefect server, workers and the MLflow UI running until Ctrl-C, so that schedules
    fire.

    Exit codes: 0 stopped by SIGTERM, 130 by Ctrl-C, 2 a service cannot be started or kept running.

    Example: rlhf up --port 4200 --mlflow-port 5000
    """
    from flows.commands.up import up as stay_up

    raise typer.Exit(stay_up(workspace, port, mlflow_port))


@app.command()
def deploy(workspace: Workspace = NEAREST) -> None:
    """Set up the Prefect server of PREFECT_API_URL for this workspace: work pools, deployments,
    their schedules.

    Workers are yours to start; `rlhf up` does all of it on one machine. A second call brings
    everything up to date.

    Example: PREFECT_API_URL=http://server:4200/api rlhf deploy
    """
    with busy("deploying"):
        from flows.commands.up import deploy as deploy_workspace

        deploy_workspace(workspace, print_text)


@app.command(cls=CommandWithProfiles, no_args_is_help=True)
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to create; it may exist.")],
    profiles: Profiles = None,
    sets: Sets = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Files with pairs of replies (collect.files.preferences); may be repeated."
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="Files with prompts, in place of pairs, for --reward; may be repeated."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION", help="The function that rewards replies to --prompts."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The starting model: a folder, .gguf file or hub id.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="A DVC cache to share with other workspaces.")
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="WORKSPACE@ALIAS",
            help="Go on from a registered policy, with the present settings of its workspace.",
        ),
    ] = None,
    probe: ProbeOption = True,
) -> None:
    """Create a workspace: params.yaml with its comments, dvc.yaml, a DVC root.

    Where there are files of pairs, what so many can show is forecast, and too few are refused. How
    long a run takes on this machine is forecast too.

    Exit codes: 0 it is ready to run; 2 it is not: nothing was made, or what settings name is missing.

    Examples:
    $ rlhf init my-run --data pairs.jsonl --model models/my-model
    $ rlhf init next --from my-run@champion --data new.jsonl
    $ rlhf init sums --prompts sums.jsonl --reward checks.py:score --model model
    $ rlhf init my-trial --profile smoke --set seed=2
    """
    with busy("making the workspace"):
        from flows.commands.init import create

        told, is_ready = create(
            folder,
            profile=",".join(profiles or ()),
            sets=sets or (),
            data=data or (),
            prompts=prompts or (),
            reward=reward or "",
            model=model or "",
            cache=cache,
            origin=origin or "",
            probe=probe,
        )
    print_text(told)
    raise typer.Exit(EXIT_OK if is_ready else EXIT_USER_ERROR)


# Every option is the study's own, --help included.
STUDY = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(hidden=True, context_settings=STUDY)
def ablate(context: typer.Context) -> None:
    """Train variants of PPO and judge the paper's claims: python -m benchmarks.ablation, where a
    checkout has it.
    """
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "ablation").is_dir():
        raise RlhfError(
            "the study of the paper's claims is not part of the installed package; run it in a clone of it"
        )
    sys.path.append(str(checkout))
    from benchmarks.ablation.__main__ import app as study

    raise typer.Exit(study(args=context.args, prog_name="rlhf ablate", standalone_mode=False) or 0)


@app.command()
def status(workspace: Workspace = NEAREST, as_json: JsonOption = False) -> None:
    """Show stages, gates, the last run and its verdict, champion and challenger, and the next
    command.
    """
    with busy("reading stages, runs and models"):
        from flows.commands.status import status as describe
        from flows.commands.text import print_screen, terminal_columns, without_secrets

        state = describe(workspace)
    if as_json:
        print_json(without_secrets(state.as_dict()))
    else:
        print_screen(state.as_text(terminal_columns()))


@app.command()
def logs(
    stage: Annotated[
        str, typer.Argument(help="A stage, or server, flow, match, mlflow, worker-POOL.")
    ],
    workspace: Workspace = NEAREST,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")
    ] = 40,
) -> None:
    """Print the end of what a stage, or a service of the last run, wrote.

    Example: rlhf logs ppo -n 100
    """
    from flows.commands.text import last_lines

    print_text(last_lines(workspace, stage, lines))


@app.command()
def doctor(
    workspace: AnyFolder = None, probe: ProbeOption = True, as_json: JsonOption = False
) -> None:
    """Check the installation and the workspace, and say what is missing or misconfigured, and how
    long a run takes on this machine.

    Exit codes: 0 no check failed (warnings do not count), 2 one did.
    """
    with busy("checking the machine, the services and the workspace"):
        from dataclasses import asdict

        from flows.commands.doctor import doctor as check
        from flows.commands.doctor import doctor_rows, failures
        from flows.commands.text import print_rows, without_secrets
        from flows.workspace import find_workspace

        try:
            folder: Path | None = find_workspace(workspace)
        except RlhfError:
            folder = workspace  # the machine is checked all the same, and the report says that there is no workspace
        results = check(folder, probe=probe)
    failed = failures(results)
    if as_json:
        checks = [asdict(result) for result in results]
        print_json(without_secrets({"checks": checks, "failed": failed}))
    else:
        print_rows(doctor_rows(results))
    raise typer.Exit(EXIT_USER_ERROR if failed else EXIT_OK)


over_core = typer.Typer()  # added after the core's commands, of which its own take the place


@over_core.command()
def report(
    workspace: Workspace = NEAREST,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write the report of whatever the pipeline has produced so far, with what was released, and
    print its path.

    Where something was registered or refused that is release.html, else report.html.

    Example: rlhf report --open
    """
    with busy("writing the report"):
        from flows.pipeline.preflight import is_up_to_date
        from flows.pipeline.verdict import REPORT_STAGE
        from flows.registry.release_page import current_page, try_release_page

        written = workspace / "report.html"
        if not is_up_to_date(
            workspace, REPORT_STAGE
        ):  # written again it would hold another run's id, and so be stale
            written = core.write_report(workspace)
        _, problem = try_release_page(workspace)
    if problem:
        print_text(problem, err=True)
    page = current_page(workspace) or written
    print_text(str(page))
    if open_page:
        typer.launch(page.resolve().as_uri())


@over_core.command()
@wraps(core.stage)
def stage(name: str, workspace: Path | None = None) -> None:
    """Run the core's command; if data are amiss, name another command that has the workspace."""
    try:
        core.stage(name, workspace)
    except DataError as error:
        from flows.supervision.processes import OWNER_VARIABLE
        from flows.workspace import lock_holder
        from rlhf_core.stages.runtime.runner import workspace_root

        holder = None if OWNER_VARIABLE in os.environ else lock_holder(workspace_root(workspace))
        if holder is None:
            raise
        raise DataError(
            f"{error}; the workspace is in use by {holder}, which may still be making it"
        ) from error


class EvaluateGroup(PluggedGroup):
    """The group ``rlhf evaluate``."""

    prefix = "evaluate."


class RegistryGroup(PluggedGroup):
    """The group ``rlhf registry``."""

    prefix = "registry."


evaluate = typer.Typer(
    cls=EvaluateGroup, help="Measure models apart from a run: two policies' replies, benchmarks."
)
evaluate.command()(core.match)
registry = typer.Typer(
    cls=RegistryGroup, help="Look after registered models: who owns them, what may be deleted."
)
registry.command()(registry_commands.terms)
over_core.add_typer(evaluate, name="evaluate", no_args_is_help=True)
over_core.add_typer(registry, name="registry", no_args_is_help=True)
app.add_typer(core.app)
app.add_typer(registry_commands.app)
app.add_typer(over_core)


def main() -> None:
    """Run the command line, which prints errors as messages, with a traceback under ``--debug``."""
    core.write_plain_logs()
    debug = DEBUG in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG]
    try:
        check_streams()
        try:
            app(args=arguments, prog_name="rlhf")
        finally:
            sys.stdout.flush()  # at the interpreter's end nobody would say that it failed
    except SystemExit:
        raise
    except (
        BaseException
    ) as error:  # a panic of a library in Rust, such as a tokenizer's, is no Exception
        if debug:
            import traceback

            sys.stderr.write(redacted(traceback.format_exc()))
        raise SystemExit(report_error(error)) from None


if __name__ == "__main__":
    main()

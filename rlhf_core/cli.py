"""The core's commands: stage, report, data, match …, and those of plugins. Heavy imports wait until
a command runs.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.commands import data as data_commands
from rlhf_core.commands.data import WorkspaceOption, print_text
from rlhf_core.commands.plugged import PluggedGroup
from rlhf_core.runtime.progress import busy

app = typer.Typer(
    cls=PluggedGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(data_commands.app, name="data")


def write_plain_logs() -> None:
    """Have warnings of a process that sets up no logs written without secrets and codes.

    They quote names of files, weights and versions, which others have chosen.
    """
    from rlhf_core.data.text import TerminalFormatter

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(TerminalFormatter("%(message)s"))


@app.command()
def stage(
    name: Annotated[
        str,
        typer.Argument(help="Stage name, such as sft or gate-reward; `rlhf status` lists them."),
    ],
    workspace: WorkspaceOption = None,
) -> None:
    """Run one stage here and now, whether it is up to date or not.

    `dvc repro NAME` runs the same command when something it depends on has changed.

    Exit codes: 0 done, 1 crashed, 2 wrong parameter or input, 3 a gate's conditions do not hold, 4
    training paused by a
    health rule, 75 preempted (SIGTERM: training finishes its step and saves its state), 130
    interrupted. Run again, a training stage goes on from its last checkpoint.
    """
    for_person = sys.stderr.isatty()  # who waits; what DVC runs is logged
    with busy(f"{name}: preparing"):
        from rlhf_core.config.loading import load_params
        from rlhf_core.stages.runtime.runner import run_stage
        from rlhf_core.storage.garbage_collection import collect_rarely

        collect_rarely()
        root = _root(workspace)
        _record_code(root, name)
        # Ranks are processes of their own, which show their progress themselves.
        launches = load_params(root).compute.launch.items() if for_person else ()
        in_ranks = any(stage == name and launch.ranks > 1 for stage, launch in launches)
    with nullcontext() if in_ranks else busy(f"{name}: running"):
        run_stage(name, root)
    if for_person:
        typer.echo(f"{name}: done", err=True)


def _root(workspace: Path | None) -> Path:
    """The workspace of a command that loads models, whose last garbage collection would only cost
    time.
    """
    from rlhf_core.stages.runtime.runner import workspace_root
    from rlhf_core.storage.garbage_collection import skip_last_collection

    skip_last_collection()
    return workspace_root(workspace)


def _record_code(root: Path, stage: str) -> None:
    """Refresh the fingerprint of a stage that is about to run: DVC then records the code that ran,
    not older code.

    Those of other stages are left alone: DVC reads the one of a running stage at its end.
    """
    from rlhf_core.config.loading import load_params
    from rlhf_core.data.collection.sources import collected_paths, reader_lines
    from rlhf_core.fingerprint.stages import write_fingerprints
    from rlhf_core.fingerprint.tracked_files import write_sources

    if not (root / ".fingerprints" / f"{stage}.txt").is_file():
        return
    params = load_params(root)
    write_fingerprints(root, [stage], params.policy.method)
    if stage == "collect":
        write_sources(
            root, collected_paths(params.collect, root), notes=reader_lines(params.collect)
        )


@app.command(hidden=True)
def fingerprint(workspace: WorkspaceOption = None) -> None:
    """Refresh the code fingerprints that dvc.yaml's stages depend on."""
    from rlhf_core.config.loading import load_params
    from rlhf_core.data.collection.sources import collected_paths, reader_lines, require_kept
    from rlhf_core.fingerprint.stages import write_fingerprints
    from rlhf_core.fingerprint.tracked_files import (
        plugin_line,
        tokenizer_patterns,
        write_evaluation_inputs,
        write_sources,
        write_starting_model,
        write_tracked_files,
    )
    from rlhf_core.plugins import DATA_REPORTS, known_plugins, model_plugins
    from rlhf_core.stages.runtime.runner import STAGES, workspace_root

    root = workspace_root(workspace)
    params = load_params(root)
    evaluation = [source.path for source in params.validate_.evaluation_files]
    # Before DVC removes the outputs of a stage that it is about to run.
    require_kept(
        [*(params.collect.files.paths() if params.collect.source == "files" else ()), *evaluation],
        root,
    )
    write_fingerprints(root, list(STAGES), params.policy.method)
    write_sources(root, collected_paths(params.collect, root), notes=reader_lines(params.collect))
    plugins = [(DATA_REPORTS, name) for name in known_plugins(DATA_REPORTS)]
    plugins += model_plugins(params.validate_.tokenizer or "")
    write_sources(
        root,
        [*evaluation, *tokenizer_patterns(root, params.validate_.tokenizer)],
        "evaluation_files",
        [plugin_line(group, name) for group, name in plugins],
    )
    write_evaluation_inputs(root, params.evaluate)
    write_starting_model(root, params.base.source)
    write_tracked_files(root, params.ppo)


@app.command("open-model", hidden=True)
def open_model(workspace: WorkspaceOption = None) -> None:
    """Open the model that base.source names without its weights; print what is to be known of it
    before a run.

    Exit codes: 0 the base stage may load it, 2 it would refuse it.
    """
    from rlhf_core.config.loading import load_params
    from rlhf_core.models.foreign import open_starting_model
    from rlhf_core.stages.runtime.runner import workspace_root

    root = workspace_root(workspace)
    base = load_params(root).base
    if (
        base.source != "scratch"
        and not open_starting_model(root, base.source, base.revision).has_template
    ):
        print_text(
            f"{base.source} has no chat template; it gets a plain one (User: … Assistant: …)"
        )


@app.command("check-pairs", hidden=True)
def check_pairs(workspace: WorkspaceOption = None) -> None:
    """Check whether pairs and adapters will do for the reward models and their gate, before
    anything is trained.

    Exit codes: 0 they do, 2 a stage or the gate would refuse them.
    """
    from rlhf_core.stages.runtime.runner import workspace_root

    root = workspace_root(workspace)
    from rlhf_core.stages.pair_supply import require_pairs

    require_pairs(root)


@app.command()
def config(
    path: Annotated[
        str | None,
        typer.Argument(
            help="A setting or section, such as ppo.kl; ppo.clip finds all of ppo that end in clip."
        ),
    ] = None,
    workspace: WorkspaceOption = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page of parameters.", hidden=True)
    ] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print the page of metrics.", hidden=True)
    ] = False,
) -> None:
    """Print settings of params.yaml with default and meaning, and the value here where it is
    another.

    Examples:
    $ rlhf config ppo.kl.coefficient
    $ rlhf config critic
    """
    if metrics:
        from rlhf_core.evaluation.report.metrics import page

        typer.echo(page(), nl=False)
        return
    from rlhf_core.commands.config import show

    print_text(show(path, workspace, markdown).removesuffix("\n"))


@app.command()
def report(workspace: WorkspaceOption = None) -> None:
    """Write report.html from whatever the pipeline has produced so far, and print its path."""
    typer.echo(write_report(workspace))


def write_report(workspace: Path | None) -> Path:
    """Write report.html and return its path."""
    from rlhf_core.stages.runtime.runner import run_stage, workspace_root

    root = workspace_root(workspace)
    run_stage("report", root)
    return root / "report.html"


@app.command()
def match(
    champion: Annotated[Path, typer.Option(help="Model folder of the champion.")],
    challenger: Annotated[Path, typer.Option(help="Model folder of the challenger.")],
    output: Annotated[Path, typer.Option(help="JSON file for the result.")],
    prompt_set: Annotated[
        int, typer.Option(min=0, help="Which set of the test prompts (registry.prompt_sets).")
    ] = 0,
    workspace: WorkspaceOption = None,
) -> None:
    """Compare the replies of two policies to the fixed test prompts by every judge that is
    available, and say how they compare.

    `rlhf promote` does this and acts on the result; this command only measures.
    """
    with busy("comparing the policies"):
        from rlhf_core.stages.runtime.threads import limit_threads_of
        from rlhf_core.storage.files import atomic_write_json

        folder = _root(workspace)
        limit_threads_of(folder)
        from rlhf_core.api.checker import Checker
        from rlhf_core.config.loading import load_params
        from rlhf_core.evaluation.match import CLEAN, run_match
        from rlhf_core.evaluation.verdict import judge_results, verdict_sentence

        params, checker = load_params(folder), None
        if not params.collect.pairs:
            checker = Checker.of_test_prompts(params.ppo.reward.sources, folder / CLEAN, folder)
        found = run_match(folder, champion, challenger, prompt_set, checker)
        atomic_write_json(output, found)
    judges = judge_results(found["comparison"])
    if judges:
        equal_lengths = "".join(judge.at_equal_length for judge in judges)
        typer.echo(f"{verdict_sentence(judges, 'the champion', None)}{equal_lengths}")
    typer.echo(output)

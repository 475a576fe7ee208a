"""The core's commands: stage, plan, report, data, annotate, match … Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.commands import annotate as annotate_commands
from rlhf_core.commands import data as data_commands
from rlhf_core.commands.annotate import WorkspaceOption
from rlhf_core.errors import EXIT_OK, EXIT_USER_ERROR, ConfigError
from rlhf_core.runtime.progress import busy

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(data_commands.app, name="data")
app.add_typer(annotate_commands.app, name="annotate")


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="Stage name, such as sft or gate-reward; `rlhf status` lists them.")],
    workspace: WorkspaceOption = None,
) -> None:
    """Run one stage here and now, whether it is up to date or not.

    `dvc repro NAME` runs the same command when something it depends on has changed.

    Exit codes: 0 done, 1 crashed, 2 wrong parameter or input, 3 a gate's conditions do not hold, 4 training paused by a
    health rule, 75 preempted (SIGTERM: training finishes its step and saves its state), 130 interrupted. Run again, a
    training stage goes on from its last checkpoint.
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
    """The workspace of a command that loads models, whose last garbage collection would only cost time."""
    from rlhf_core.stages.runtime.runner import workspace_root
    from rlhf_core.storage.garbage_collection import skip_last_collection

    skip_last_collection()
    return workspace_root(workspace)


def _record_code(root: Path, stage: str) -> None:
    """Refresh the fingerprint of a stage that is about to run: DVC then records the code that ran, not that of before.

    Those of other stages are left alone: DVC reads the one of a running stage at its end.
    """
    from rlhf_core.config.loading import load_params
    from rlhf_core.data.collection.sources import collected_paths
    from rlhf_core.fingerprint.stages import write_fingerprints
    from rlhf_core.fingerprint.tracked_files import write_sources

    if not (root / ".fingerprints" / f"{stage}.txt").is_file():
        return
    params = load_params(root)
    write_fingerprints(root, [stage], params.policy.method)
    if stage == "collect":
        write_sources(root, collected_paths(params.collect, root))


@app.command(hidden=True)
def fingerprint(workspace: WorkspaceOption = None) -> None:
    """Refresh the code fingerprints that dvc.yaml's stages depend on."""
    from rlhf_core.config.loading import load_params
    from rlhf_core.data.collection.sources import collected_paths, require_kept
    from rlhf_core.fingerprint.stages import write_fingerprints
    from rlhf_core.fingerprint.tracked_files import (
        tokenizer_patterns,
        write_evaluation_inputs,
        write_sources,
        write_starting_model,
        write_tracked_files,
    )
    from rlhf_core.stages.runtime.runner import STAGES, workspace_root

    root = workspace_root(workspace)
    params = load_params(root)
    evaluation = [source.path for source in params.validate_.evaluation_files]
    # Before DVC removes the outputs of a stage that it is about to run.
    require_kept([*(params.collect.files.paths() if params.collect.source == "files" else ()), *evaluation], root)
    write_fingerprints(root, list(STAGES), params.policy.method)
    write_sources(root, collected_paths(params.collect, root))
    write_sources(root, [*evaluation, *tokenizer_patterns(root, params.validate_.tokenizer)], "evaluation_files")
    write_evaluation_inputs(root, params.evaluate)
    write_starting_model(root, params.base.source)
    write_tracked_files(root, params.ppo.reward.sources)


@app.command("open-model", hidden=True)
def open_model(workspace: WorkspaceOption = None) -> None:
    """Open the model that base.source names without its weights; print what is to be known of it before a run.

    Exit codes: 0 the base stage may load it, 2 it would refuse it.
    """
    from rlhf_core.config.loading import load_params
    from rlhf_core.models.foreign import open_starting_model
    from rlhf_core.stages.runtime.runner import workspace_root

    root = workspace_root(workspace)
    base = load_params(root).base
    if base.source != "scratch" and not open_starting_model(root, base.source, base.revision).has_template:
        typer.echo(f"{base.source} has no chat template; it gets a plain one (User: … Assistant: …)")


@app.command("check-pairs", hidden=True)
def check_pairs(workspace: WorkspaceOption = None) -> None:
    """Check whether pairs and adapters will do for the reward models and their gate, before anything is trained.

    Exit codes: 0 they do, 2 a stage or the gate would refuse them.
    """
    from rlhf_core.stages.runtime.runner import workspace_root

    root = workspace_root(workspace)
    from rlhf_core.stages.reward import require_pairs

    require_pairs(root)


@app.command()
def config(
    path: Annotated[
        str | None,
        typer.Argument(help="A setting or section, such as ppo.kl; ppo.clip finds all of ppo that end in clip."),
    ] = None,
    workspace: WorkspaceOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of parameters.", hidden=True)] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print the page of metrics.", hidden=True)] = False,
) -> None:
    """Print settings of params.yaml with default and meaning, and the value here where it is another.

    Examples:
    $ rlhf config ppo.kl.coefficient
    $ rlhf config critic
    """
    if metrics:
        from rlhf_core.evaluation.report.metrics import page

        typer.echo(page(), nl=False)
        return
    from rlhf_core.commands.config import show

    typer.echo(show(path, workspace, markdown), nl=False)


@app.command()
def plan(
    workspace: WorkspaceOption = None,
    profiles: Annotated[list[str] | None, typer.Option("--profile", "-p", help="Overlay on params.yaml.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", "-s", help="section.key=value over params.yaml.")] = None,
    stages: Annotated[list[str] | None, typer.Option("--stage", help="Only this stage; may be repeated.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs that share a job: one process on each.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="Memory of one GPU in GiB.")] = None,
    zero: Annotated[int | None, typer.Option("--zero-stage", help="DeepSpeed's ZeRO stage, 0 to 3.")] = None,
    offload: Annotated[
        str | None, typer.Option(help="What waits in host memory: none, optimizer or parameters.")
    ] = None,
    frozen: Annotated[str | None, typer.Option(help="Frozen models: device, offload or sharded.")] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Gradient checkpointing: compute activations again in the backward pass.",
        ),
    ] = None,
    bf16: Annotated[bool | None, typer.Option("--bf16/--fp32", help="Weights in bfloat16 or float32.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Adapters of this rank instead of all weights.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt of rollouts.")] = None,
    config: Annotated[Path | None, typer.Option(help="config.json in place of the starting model's.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Print one line; exit with 2 if it cannot fit.")] = False,
    times: Annotated[
        bool, typer.Option("--time", help="Measure for some seconds how long each stage takes on this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Estimate memory per GPU by model and phase of every training stage, and what to change when it does not fit.

    The passes of each stage run on shapes alone: no weights are downloaded or loaded. Options stand for settings of
    every stage that is planned; those left out are as in params.yaml. Lengths come from the workspace's data; before
    there are any, and with --profile, --set or --config, from the limits of the settings.

    Exit codes: 0 it fits or nothing is known against it, 2 it does not fit, or the settings are wrong.

    Example: rlhf plan --profile paper-7b --gpus 8 --gpu-memory 80
    """
    with busy("running the stages on shapes, to see what memory they need"):
        root = _root(workspace)
        if times:
            from rlhf_core.stages.runtime.threads import limit_threads_of

            limit_threads_of(root)  # as the stages are limited that are timed
        from rlhf_core.memory.command import PlanRequest, describe

        options = (gpus, gpu_memory, zero, offload, frozen, gradient_checkpointing, bf16, lora_rank, prompt_tokens)
        request = PlanRequest(root, ",".join(profiles or ()) or None, sets or (), stages or (), config, *options)
        plans = [] if check else request.plans()
        clock = request.time() if times and not check else None
        answer = request.check() if check else describe(plans, request.forecast(), clock, as_json=as_json)
    typer.echo(answer)
    raise typer.Exit(EXIT_OK if all(plan.fits for plan in plans) else EXIT_USER_ERROR)


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
    prompt_set: Annotated[int, typer.Option(min=0, help="Which set of the test prompts (registry.prompt_sets).")] = 0,
    workspace: WorkspaceOption = None,
) -> None:
    """Compare the replies of two policies to the fixed test prompts by every judge that is available.

    `rlhf promote` does this and acts on the result; this command only measures.
    """
    with busy("comparing the policies"):
        from rlhf_core.stages.runtime.threads import limit_threads_of
        from rlhf_core.storage.files import atomic_write_json

        folder = _root(workspace)
        limit_threads_of(folder)
        from rlhf_core.evaluation.match import run_match

        atomic_write_json(output, run_match(folder, champion, challenger, prompt_set))
    typer.echo(output)


@app.command(no_args_is_help=True)
def benchmark(
    file: Annotated[Path, typer.Argument(help="Rows with prompt, chosen, rejected and subset, as in RewardBench 2.")],
    model: Annotated[
        Path | None, typer.Option(help="Folder of a reward model; default: models/reward of the workspace.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Replies scored at once.")] = 16,
    workspace: WorkspaceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure how often a reward model scores the right reply above all wrong ones, by subset.

    Examples:
    $ rlhf evaluate benchmark reward-bench-2.parquet
    $ rlhf evaluate benchmark questions.jsonl --model models/judge --json
    """
    with busy("loading the reward model"):
        from rlhf_core.stages.runtime.runner import workspace_root
        from rlhf_core.storage.garbage_collection import skip_last_collection

        skip_last_collection()
        folder = model or workspace_root(workspace) / "models" / "reward"
        from rlhf_core.evaluation.benchmarks.reward_benchmark import as_text, read_benchmark, run_benchmark
        from rlhf_core.evaluation.judges.model import ModelJudge
        from rlhf_core.models.foreign import require_openable

        rows = read_benchmark(file)
        require_openable(folder)
        judge = ModelJudge.load(folder, "reward", batch_size)
    with busy(f"scoring {sum(len(row.replies) for row in rows):,} replies"):
        result = run_benchmark(judge, rows)
    if as_json:
        import json

        typer.echo(json.dumps(result, indent=2))
    else:
        typer.echo(as_text(result))


@app.command("lm-eval", no_args_is_help=True)
def lm_eval(
    models: Annotated[
        list[Path] | None, typer.Argument(help="Model folders; default: models/sft and models/policy of the workspace.")
    ] = None,
    tasks: Annotated[list[str] | None, typer.Option("--task", "-t", help="A task or group; may be repeated.")] = None,
    include_path: Annotated[
        list[Path] | None, typer.Option(help="Folder with task YAMLs of your own; may be repeated.")
    ] = None,
    few_shot: Annotated[int | None, typer.Option(min=0, help="Examples before a question; else the task's.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many rows of a task, to try it out.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a pass.")] = 16,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Write prompts as dialogues.")] = False,
    output: Annotated[Path, typer.Option(help="JSON file for lm-eval's results.")] = Path("lm_eval.json"),
    workspace: WorkspaceOption = None,
) -> None:
    """Run tasks of lm-evaluation-harness on SFT and policy, or on other models (the extra lm-eval).

    Metrics and standard errors are lm-eval's own. A task on local files needs no network; with HF_HUB_OFFLINE=1
    nothing is downloaded. The Python functions that a task names run with your rights.

    Examples:
    $ rlhf evaluate lm-eval --task my_exam --include-path tasks
    $ rlhf evaluate lm-eval models/policy --task arc_easy --task ceval-valid --few-shot 5
    """
    if not tasks:
        raise ConfigError("name at least one task with --task")
    with busy("loading lm-eval"):
        from rlhf_core.stages.runtime.runner import workspace_root
        from rlhf_core.storage.garbage_collection import skip_last_collection

        skip_last_collection()
        folders = models or [workspace_root(workspace) / "models" / name for name in ("sft", "policy")]
        names = [folder.name for folder in folders]
        by_name = {folder.name if names.count(folder.name) == 1 else str(folder): folder for folder in folders}
        from rlhf_core.evaluation.benchmarks.lm_evaluation_harness import as_text, run_tasks
        from rlhf_core.storage.files import atomic_write_json

    results = run_tasks(by_name, tasks, include_path or [], few_shot, limit, batch_size, chat_template)
    atomic_write_json(output, results)
    typer.echo(as_text(results))
    typer.echo(f"\n{output}")

"""``rlhf evaluate benchmark`` and ``rlhf evaluate lm-eval``. Heavy imports wait until one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.commands.data import WorkspaceOption, print_text
from rlhf_core.errors import ConfigError
from rlhf_core.runtime.progress import busy

reward_benchmark = typer.Typer(add_completion=False, rich_markup_mode="rich")
harness = typer.Typer(add_completion=False, rich_markup_mode="rich")


@reward_benchmark.command(no_args_is_help=True)
def benchmark(
    file: Annotated[
        Path,
        typer.Argument(help="Rows with prompt, chosen, rejected and subset, as in RewardBench 2."),
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a reward model; default: models/reward of the workspace."),
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
        from rlhf_core.evaluation.judges.model import ModelJudge
        from rlhf_core.models.foreign import require_openable
        from rlhf_extras.benchmarks.reward_benchmark import as_text, read_benchmark, run_benchmark

        rows = read_benchmark(file)
        require_openable(folder)
        judge = ModelJudge.load(folder, "reward", batch_size)
    with busy(f"scoring {sum(len(row.replies) for row in rows):,} replies"):
        result = run_benchmark(judge, rows)
    if as_json:
        import json

        print_text(json.dumps(result, indent=2))
    else:
        print_text(as_text(result))


@harness.command(no_args_is_help=True)
def lm_eval(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Model folders; default: models/sft and models/policy of the workspace."
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--task", "-t", help="A task or group; may be repeated.")
    ] = None,
    include_path: Annotated[
        list[Path] | None, typer.Option(help="Folder with task YAMLs of your own; may be repeated.")
    ] = None,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="Examples before a question; else the task's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many rows of a task, to try it out.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a pass.")] = 16,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Write prompts as dialogues.")
    ] = False,
    output: Annotated[Path, typer.Option(help="JSON file for lm-eval's results.")] = Path(
        "lm_eval.json"
    ),
    workspace: WorkspaceOption = None,
) -> None:
    """Run tasks of lm-evaluation-harness on SFT and policy, or on other models (the extra lm-eval).

    Metrics and standard errors are lm-eval's own. A task on local files needs no network; with
    HF_HUB_OFFLINE=1 nothing is downloaded. The Python functions that a task names run with your
    rights.

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
        folders = models or [
            workspace_root(workspace) / "models" / name for name in ("sft", "policy")
        ]
        names = [folder.name for folder in folders]
        by_name = {}
        for folder in folders:
            is_unique = names.count(folder.name) == 1
            by_name[folder.name if is_unique else str(folder)] = folder
        from rlhf_core.storage.files import atomic_write_json
        from rlhf_extras.benchmarks.lm_evaluation_harness import as_text, run_tasks

    results = run_tasks(
        by_name, tasks, include_path or [], few_shot, limit, batch_size, chat_template
    )
    atomic_write_json(output, results)
    print_text(as_text(results))
    print_text(f"\n{output}")

"""Tasks of EleutherAI's lm-evaluation-harness (the extra ``lm-eval``) on SFT and policy.

Numbers and standard errors are lm-eval's own. The models are loaded here, from folders with safetensors, so no code of
a model runs; a task's YAML can name Python functions beside it (``!function``), which do.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_core.errors import ConfigError, DataError, RlhfError, named_line
from rlhf_core.evaluation.figures import format_number
from rlhf_core.models.foreign import require_openable
from rlhf_core.models.starting.base import load_policy

MISSING = "lm-eval is not installed: pip install 'rlhf-pipeline[lm-eval]'"
STDERR = "_stderr"
# What lm-eval records of the machine: nothing that its numbers depend on, and much that identifies a host.
OF_THE_MACHINE = ("pretty_env_info",)


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks to run, and how.

    Attributes:
        tasks: Names of tasks or groups, those of ``include_paths`` first.
        include_paths: Folders with task YAMLs.
        few_shot: Examples before each question; None leaves it to the task.
        limit: Only the first rows of each task, to try it out; None for all.
        batch_size: Rows of a pass.
        chat_template: Whether prompts are written as dialogues in the model's chat template.
    """

    tasks: Sequence[str]
    include_paths: Sequence[Path] = ()
    few_shot: int | None = None
    limit: int | None = None
    batch_size: int = 16
    chat_template: bool = False


@dataclass(frozen=True)
class TaskMetric:
    """One metric of one task; ``stderr`` is None where lm-eval gives none."""

    task: str
    metric: str
    value: float
    stderr: float | None


def run_tasks(folders: Mapping[str, Path], options: TaskOptions) -> dict[str, Any]:
    """Run the tasks on each model, one model in memory at a time, and return lm-eval's results by model.

    ``HF_HUB_OFFLINE=1`` keeps it off the network: tasks on local files and cached data sets run, others are refused.

    Raises:
        RlhfError: lm-eval is not installed.
        ConfigError: A folder or a task does not exist.
        DataError: lm-eval could not run a task.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RlhfError(MISSING) from error
    for path in options.include_paths:
        if not path.is_dir():
            raise ConfigError(f"--include-path {path} is no folder; name the folder that has the tasks' YAML files")
    paths = [str(path) for path in options.include_paths]
    # The harness's own 14,000 tasks take long to index: only where the folders do not have them all.
    manager = TaskManager(include_path=paths, include_defaults=False)
    if not all(manager.match_tasks([name]) for name in options.tasks):
        manager = TaskManager(include_path=paths)
    unknown = [name for name in options.tasks if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"lm-eval knows no task {unknown[0]!r}; lm_eval ls tasks lists its own, --include-path adds yours"
        )
    return {name: _evaluate(folder, options, manager) for name, folder in folders.items()}


def _evaluate(folder: Path, options: TaskOptions, manager: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    require_openable(folder)
    model, tokenizer = load_policy(folder)
    language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size, trust_remote_code=False)
    try:
        results = simple_evaluate(
            language_model,
            tasks=list(options.tasks),
            task_manager=manager,
            num_fewshot=options.few_shot,
            limit=options.limit,
            batch_size=options.batch_size,
            apply_chat_template=options.chat_template,
            log_samples=False,
        )
    except Exception as error:  # whatever a task's YAML, its data or its functions raise
        raise DataError(f"lm-eval cannot run {', '.join(options.tasks)}: {named_line(error)}") from error
    kept = {name: value for name, value in results.items() if name not in OF_THE_MACHINE}
    return dict(_json_values(json.loads(json.dumps(kept, default=str))))


def _json_values(value: Any) -> Any:
    """Return JSON values with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _json_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def task_metrics(results: Mapping[str, Any]) -> list[TaskMetric]:
    """Return the metrics of lm-eval's results, groups included; their keys are ``metric,filter`` there."""
    metrics = []
    for task, values in (results["results"] | results.get("groups", {})).items():
        for key, value in values.items():
            name, comma, applied = key.partition(",")
            if not comma or name.endswith(STDERR) or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{name}{STDERR},{applied}")
            label = name if applied == "none" else f"{name} ({applied})"
            metrics.append(TaskMetric(task, label, value, stderr if isinstance(stderr, int | float) else None))
    return metrics


def as_text(results: Mapping[str, Mapping[str, Any]], width: int = 80) -> str:
    """Return a table of all metrics, a column for each model, with lm-eval's standard errors."""
    by_model = {name: {(m.task, m.metric): m for m in task_metrics(of_model)} for name, of_model in results.items()}
    table = Table(box=None, pad_edge=False)
    for header in ("task", "metric"):
        table.add_column(header, overflow="fold")
    for name in by_model:
        table.add_column(name, justify="right")
    if len(by_model) == 2:
        table.add_column("change", justify="right")
    for key in dict.fromkeys(key for metrics in by_model.values() for key in metrics):
        row = [metrics.get(key) for metrics in by_model.values()]
        cells = [*key, *(_cell(metric) for metric in row)]
        if len(row) == 2:
            first, second = row
            cells.append(f"{second.value - first.value:+.4f}" if first and second else "")
        table.add_row(*cells)
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _cell(metric: TaskMetric | None) -> str:
    if metric is None:
        return ""
    error = "" if metric.stderr is None else f" ± {metric.stderr:.4f}"
    return f"{format_number(metric.value, 4)}{error}"

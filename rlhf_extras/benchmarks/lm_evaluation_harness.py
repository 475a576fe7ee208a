"""Tasks of EleutherAI's lm-evaluation-harness (the extra ``lm-eval``) on SFT and policy.

Numbers and standard errors are lm-eval's own. The models are loaded here, from folders with
safetensors, so no code of a model runs; a task's YAML can name Python functions beside it
(``!function``), which do.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_core.data.chat_template import render_turns
from rlhf_core.errors import ConfigError, DataError, RlhfError, named_line
from rlhf_core.evaluation.figures import format_number
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.models.foreign import require_openable
from rlhf_core.runtime.progress import busy

MISSING = "lm-eval is not installed: pip install 'rlhf-pipeline[lm-eval]'"
STDERR = "_stderr"
# What lm-eval records of the machine: nothing that its numbers depend on, and much that identifies
# a host.
OF_THE_MACHINE = ("pretty_env_info",)


def run_tasks(
    folders: Mapping[str, Path],
    tasks: Sequence[str],
    include_paths: Sequence[Path] = (),
    few_shot: int | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    chat_template: bool = False,
) -> dict[str, Any]:
    """Run the tasks on each model, one model in memory at a time, and return lm-eval's results by
    model.

    ``HF_HUB_OFFLINE=1`` keeps it off the network: tasks on local files and cached data sets run,
    others are refused.

    Args:
        folders: Model folders by name.
        tasks: Names of tasks or groups, those of ``include_paths`` first.
        include_paths: Folders with task YAMLs.
        few_shot: Examples before each question; None leaves it to the task.
        limit: Only the first rows of each task, to try it out; None for all.
        batch_size: Rows of a pass.
        chat_template: Whether prompts are written as dialogues in the model's chat template.

    Raises:
        RlhfError: lm-eval is not installed.
        ConfigError: A folder or a task does not exist.
        DataError: lm-eval could not run a task.
    """
    try:
        with busy("loading lm-eval"):
            from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RlhfError(MISSING) from error
    for path in include_paths:
        if not path.is_dir():
            raise ConfigError(
                f"--include-path {path} is no folder; name the folder that has the tasks' YAML files"
            )
    paths = [str(path) for path in include_paths]
    # The harness's own 14,000 tasks take long to index: only where the folders do not have them
    # all.
    with busy("looking up the tasks"):
        manager = TaskManager(include_path=paths, include_defaults=False)
        if not all(manager.match_tasks([name]) for name in tasks):
            manager = TaskManager(include_path=paths)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"lm-eval knows no task {unknown[0]!r}; lm_eval ls tasks lists its own, --include-path adds yours"
        )
    by_model = {}
    for model_name, folder in folders.items():
        with busy(f"loading {model_name}"):  # then lm-eval shows how far it is
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM

            require_openable(folder)
            model, tokenizer = load_policy(folder)
        # lm-eval runs the template itself otherwise: without limits, and on the day that it is.
        tokenizer.apply_chat_template = partial(_rendered, tokenizer)  # type: ignore[method-assign]
        try:
            results = simple_evaluate(
                HFLM(
                    pretrained=model,
                    tokenizer=tokenizer,
                    batch_size=batch_size,
                    trust_remote_code=False,
                ),
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=few_shot,
                limit=limit,
                batch_size=batch_size,
                apply_chat_template=chat_template,
                log_samples=False,
            )
        except Exception as error:  # whatever a task's YAML, its data or its functions raise
            raise DataError(
                f"lm-eval cannot run {', '.join(tasks)}: {named_line(error)}"
            ) from error
        del model
        kept = {name: value for name, value in results.items() if name not in OF_THE_MACHINE}
        plain = json.loads(json.dumps(kept, default=str))
        by_model[model_name] = dict(_json_values(plain))
    return by_model


def _rendered(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], *, tokenize: bool, **arguments: Any
) -> str:
    return render_turns(tokenizer, turns, **arguments)


def _json_values(value: Any) -> Any:
    """Return JSON values with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _json_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def task_metrics(results: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """Return by (task, metric) value and standard error of lm-eval's results, groups included.

    Their keys are ``metric,filter`` there; the error is None where lm-eval gives none.
    """
    metrics: dict[tuple[str, str], tuple[float, float | None]] = {}
    for task, values in (results["results"] | results.get("groups", {})).items():
        for key, value in values.items():
            name, comma, applied = key.partition(",")
            if not comma or name.endswith(STDERR) or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{name}{STDERR},{applied}")
            label = name if applied == "none" else f"{name} ({applied})"
            metrics[task, label] = value, stderr if isinstance(stderr, int | float) else None
    return metrics


def as_text(results: Mapping[str, Mapping[str, Any]], width: int = 80) -> str:
    """Return a table of all metrics, a column for each model, with lm-eval's standard errors."""
    by_model = {name: task_metrics(of_model) for name, of_model in results.items()}
    table = Table(box=None, pad_edge=False)
    for header in ("task", "metric"):
        table.add_column(header, overflow="fold")
    for name in by_model:
        table.add_column(name, justify="right")
    if len(by_model) == 2:
        table.add_column("change", justify="right")
    for key in dict.fromkeys(chain.from_iterable(by_model.values())):
        row = [metrics.get(key) for metrics in by_model.values()]
        cells = [*key]
        for metric in row:
            cells.append(_cell(*metric) if metric else "")
        if len(row) == 2:
            first, second = row
            cells.append(f"{second[0] - first[0]:+z.4f}" if first and second else "")
        table.add_row(*cells)
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _cell(value: float, stderr: float | None) -> str:
    return f"{format_number(value, 4)}{'' if stderr is None else f' ± {stderr:.4f}'}"

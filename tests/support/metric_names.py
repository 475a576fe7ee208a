"""The names of metrics that one experiment has in MLflow with a run of every method.

metric_names.json has the numbers in the files of runs by each method of docs/train.md, one of them
with the best of 16 replies, and of a smoke run; and those of a checker, a language model and a judge
of a plugin (``my_judge``), multiple-choice questions and verifiable prompts. ``no file`` has those of
stages that write none.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.tracking.pipeline_run import HEADLINE, RESULTS
from rlhf_core.tracking.stage_run import grouped, results

MOST = 300
RECORDED = Path(__file__).with_suffix(".json")


def names_in_mlflow() -> set[str]:
    """Return the names of stages, pipeline runs and registrations."""
    names = {RESULTS + name for name in HEADLINE}
    names |= {RESULTS + "data.preferences.train", RESULTS + "data.prompts.train"}
    for file, numbers in json.loads(RECORDED.read_text()).items():
        if file.startswith("history/"):
            names |= {grouped(name) for name in numbers}
        else:
            shown = results(dict.fromkeys(numbers, 1.0), Path(file).stem)
            names |= {grouped(name) for name in shown}
    return names

"""Stage report: an HTML file, headline metrics and curves of what a run has left so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.config.evaluation import ReportConfig
from rlhf_core.evaluation.report.headline import headline_metrics, write_curves
from rlhf_core.evaluation.report.note import verdict_tags
from rlhf_core.evaluation.report.sources import HISTORIES, STAGES, load_sources, report_lineage
from rlhf_core.evaluation.report.view import build_context, render
from rlhf_core.gates import GATES
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json, atomic_write_text
from rlhf_core.training.run_context import RunContext

INPUTS = {
    "comparisons": "samples/comparisons.parquet",
    "bad_cases": "samples/bad_cases.jsonl",
    "reward_mistakes": "samples/reward_mistakes.jsonl",
    "reward_plots": "plots/reward",
    "data_card": "data/card",
}
INPUTS |= {f"{name}_metrics": f"metrics/{name}.json" for name in STAGES}
INPUTS |= {f"{name}_gate": f"gates/{name}.json" for name in GATES}
INPUTS |= {f"{name}_history": f"history/{name}.jsonl" for name in HISTORIES}


def run(config: ReportConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Write ``report.html``, the headline metrics and the training curves.

    Missing parts are named. Files of stages behind a failed gate are from an earlier run and are
    left out. The workspace's params.yaml is quoted for the reader, beside the commit, dvc.lock and
    the run in MLflow; nothing depends on them.
    """
    workspace = outputs.report.parent
    lineage = report_lineage(workspace, context.tracker.run_id)
    sources = load_sources(inputs, workspace / "params.yaml", lineage)
    atomic_write_text(outputs.report, render(build_context(sources, config.title, config.replies)))
    if sources.data_card:  # the copy of the report in the run links to it
        folder = str(Path(sources.data_card).parent)
        context.tracker.log_artifact(workspace / sources.data_card, folder)
    atomic_write_json(outputs.headline, headline_metrics(sources.metrics))
    write_curves(sources.histories, outputs.curves)
    evaluation = sources.metrics.get("evaluation", {})
    if tags := verdict_tags(workspace, evaluation, sources.gates.get("policy")):
        context.tracker.set_tags(tags)
    return {"missing_parts": float(len(sources.missing))}


STAGE = Stage(
    name="report",
    config=ReportConfig,
    run=run,
    inputs=INPUTS,
    outputs={"report": "report.html", "headline": "metrics/summary.json", "curves": "plots/curves"},
    optional_inputs=frozenset(INPUTS),
)

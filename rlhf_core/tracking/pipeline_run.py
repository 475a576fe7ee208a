"""The run over the runs of the stages: settings, data, results and files of a pipeline run.

``rlhf run`` opens one for each run. In ``dvc exp run`` nothing of this project outlives a stage:
the first stage opens the run of the experiment, and each stage that ends writes its state there.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from rlhf_core.config.loading import PARAMS_FILE
from rlhf_core.config.recipe import recorded_outputs
from rlhf_core.config.yaml_text import plain, read
from rlhf_core.redaction import redacted
from rlhf_core.storage.files import flatten, read_json

PIPELINE_TAG, EXPERIMENT_TAG, PARENT_TAG = (
    "rlhf.pipeline",
    "rlhf.dvc_experiment",
    "mlflow.parentRunId",
)
REPORT_PAGE, RELEASE_PAGE = "report.html", "release.html"
FINAL_FILES = (REPORT_PAGE, PARAMS_FILE, "dvc.lock")
FINAL_FOLDERS = ("metrics", "gates", "plots", "data/card")
CLEAN_DATA = "data/clean"
HEADLINE_FILE = Path("metrics") / "summary.json"
# The figures that runs are compared by: name in the headline, with the judge of a win rate, and
# where the metric is: the stage's file, then the path in it.
HEADLINE = {
    "reward.test_accuracy": "reward.test_accuracy",
    "judge.win_rate": "evaluation.comparison.judge.win_rate",
    "judge.win_rate_low95": "evaluation.comparison.judge.win_rate_low95",
    "gold.win_rate": "evaluation.comparison.gold.win_rate",
    "checker.sft": "evaluation.sft.checker",
    "checker.policy": "evaluation.policy.checker",
    "checker.gain_low95": "evaluation.comparison.checker.mean_difference_low95",
    "kl": "evaluation.kl",
    "length": "evaluation.policy.length",
}
RESULTS = "final/"  # how the names of results begin in MLflow
HEADLINE_NAMES = {path: name for name, path in HEADLINE.items()}
COMPARISON = "evaluation.comparison."
LONGEST_NAME, LONGEST_PARAM, LONGEST_DIGEST = 250, 500, 36
VERDICT_TAG, NOTE_TAG = "verdict", "mlflow.note.content"
ERROR_TAG = "rlhf.error"  # why a stage's run failed, in one line
PROCESS_TAG = "rlhf.dvc_process"  # machine, id and start of the `dvc` that runs an experiment
WORKSPACE_ID_TAG = "rlhf.workspace_id"
# By which DVC tells a stage the experiment that it belongs to.
DVC_NAME, DVC_BASELINE = "DVC_EXP_NAME", "DVC_EXP_BASELINE_REV"


def current_experiment() -> dict[str, str]:
    """The tag of the DVC experiment that this stage belongs to; empty outside ``dvc exp run``.

    Names are unique among the experiments of a commit, not beyond.
    """
    name, baseline = os.environ.get(DVC_NAME), os.environ.get(DVC_BASELINE, "")
    return {EXPERIMENT_TAG: f"{legal_name(name)} {baseline}".strip()} if name else {}


def experiment_process() -> str:
    """Name the process of DVC that runs the experiment of this stage.

    It is the nearest one above this that has not got the experiment's name in its environment, and
    gives it to the stage.
    """
    for process in psutil.Process().parents():
        try:
            given = process.environ()
        except psutil.Error:  # of another user, or gone
            return ""
        if DVC_NAME not in given:
            return named_process(process.pid)
    return ""


def named_process(pid: int) -> str:
    """Name a process of this machine so that a later one with the same id is another."""
    return f"{socket.gethostname()} {pid} {psutil.Process(pid).create_time():.0f}"


def has_ended(process: str) -> bool:
    """Whether a process named by :func:`named_process` is known to be gone.

    Of one of another machine nothing is known.
    """
    host, _, rest = process.partition(" ")
    pid, _, started = rest.partition(" ")
    if host != socket.gethostname() or not (pid.isdigit() and started.isdigit()):
        return False
    try:
        found = psutil.Process(int(pid))
        is_same = abs(found.create_time() - int(started)) <= CLOCK_SECONDS
        return not is_same or found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


CLOCK_SECONDS = 2  # by which the start of a process may be told otherwise, as the clock is set


def abandoned_experiments(client: Any, experiment_id: str, workspace_id: str) -> list[Any]:
    """Return the runs of the workspace's DVC experiments that go on in MLflow without their DVC.

    It was killed between two stages, or ended with another stage than the report, as
    ``dvc exp run STAGE`` does.
    """
    own = (
        f"tags.`{WORKSPACE_ID_TAG}` = '{workspace_id}' and tags.`{PIPELINE_TAG}` = 'true' "
        "and attributes.status = 'RUNNING'"
    )
    found = []
    for run in client.search_runs([experiment_id], own):
        tags = run.data.tags
        if EXPERIMENT_TAG in tags and has_ended(tags.get(PROCESS_TAG, "")):
            found.append(run)
    return found


def end_abandoned(client: Any, experiment_id: str, workspace_id: str) -> None:
    """End the runs of DVC experiments that went without a report.

    One with a stage that has not ended is left: that is at work, or was killed, and the delivery of
    its records ends both.
    """
    for run in abandoned_experiments(client, experiment_id, workspace_id):
        if not open_stages(client, run):
            end_experiment(client, run.info.run_id, "FINISHED")


def open_stages(client: Any, run: Any) -> list[str]:
    """Return the ids of the runs below ``run`` that have not ended."""
    below = f"tags.`{PARENT_TAG}` = '{run.info.run_id}' and attributes.status = 'RUNNING'"
    return [stage.info.run_id for stage in client.search_runs([run.info.experiment_id], below)]


def end_experiment(client: Any, run_id: str, status: str) -> None:
    """End the run of a DVC experiment whose DVC is gone before the report."""
    client.set_tag(run_id, VERDICT_TAG, "no verdict: ended before its report")
    client.set_terminated(run_id, status)


def experiment_run(
    client: Any, experiment_id: str, workspace: Path, stage_tags: Mapping[str, str]
) -> str:
    """Return the id of the DVC experiment's run, which its first stage makes.

    ``stage_tags`` name the experiment.
    """
    named = stage_tags[EXPERIMENT_TAG]
    own = f"tags.`{EXPERIMENT_TAG}` = '{named}' and tags.`{PIPELINE_TAG}` = 'true'"
    known = client.search_runs([experiment_id], own, max_results=1)
    if known:
        run_id = str(known[0].info.run_id)
        client.update_run(run_id, status="RUNNING")
        client.set_tag(run_id, PROCESS_TAG, stage_tags.get(PROCESS_TAG, ""))
        return run_id
    end_abandoned(client, experiment_id, stage_tags[WORKSPACE_ID_TAG])
    # What workspace_tags and origin_tags have told the stage, and the experiment.
    common = (
        "mlflow.user",
        "mlflow.source.",
        "rlhf.package",
        "rlhf.changed",
        "rlhf.workspace",
        "workspace",
        EXPERIMENT_TAG,
        PROCESS_TAG,
    )
    tags = {name: text for name, text in stage_tags.items() if name.startswith(common)}
    tags["mlflow.source.name"] = "dvc exp run"
    return open_pipeline_run(client, experiment_id, workspace, named.partition(" ")[0], tags)


def follow_stage(
    client: Any, workspace: Path, stage_run: str, stage_tags: Mapping[str, str], status: str
) -> None:
    """Let the run of a DVC experiment end with the stage that ends it; it runs on after others.

    DVC ends an experiment with the stage that fails, and else with the report, which has written
    the headline. Both tell their verdict by tags of their own runs. Where DVC itself is gone, the
    stage was the last one, or was told of late.
    """
    run_id, stage = stage_tags[PARENT_TAG], stage_tags["stage"]
    if stage == "report" or status != "FINISHED":
        log_final_artifacts(client, run_id, workspace)
        told = client.get_run(stage_run)
        verdict = told.data.tags.get(VERDICT_TAG) or _no_verdict(stage, status, told.data.tags)
        note = told.data.tags.get(NOTE_TAG) or f"**{verdict[:1].upper()}{verdict[1:]}**\n"
        if stage == "report":
            page = run_page(told.info.experiment_id, run_id, REPORT_PAGE)
            note += f"\n- Report: [{REPORT_PAGE}]({page})"
        note += f"\n- Next: `rlhf run` ({AFTER_REPORT if stage == 'report' else AFTER_FAILURE})"
        client.set_tag(run_id, VERDICT_TAG, verdict)
        client.set_tag(run_id, NOTE_TAG, note)
        client.set_terminated(run_id, status)
    elif has_ended(stage_tags.get(PROCESS_TAG, "")):
        end_experiment(client, run_id, status)


AFTER_REPORT = "registers what its gates let pass"
AFTER_FAILURE = "once that is corrected; what is up to date is not repeated"


def _no_verdict(stage: str, status: str, tags: Mapping[str, str]) -> str:
    """Say why the stage that ended an experiment has no verdict."""
    if status == "KILLED":
        return f"no verdict: stopped during {stage}"
    if status == "FINISHED":
        return "no verdict: no policy was compared with SFT"
    return f"no verdict: {stage} failed: {tags.get(ERROR_TAG, 'its process was killed')}"


def open_pipeline_run(
    client: Any, experiment_id: str, workspace: Path, name: str, tags: Mapping[str, str]
) -> str:
    """Make the run of ``rlhf run`` or ``dvc exp run`` with the settings of params.yaml.

    Args:
        name: What the run is called.
        tags: Which workspace it is of, and who started it: :func:`.workspace_tags` and
            :func:`.origin_tags`.

    Returns:
        Its id.
    """
    from mlflow.entities import Param

    params = recorded_params(workspace)
    own = {"mlflow.runName": name, PIPELINE_TAG: "true"}
    if profile := params.get("profile"):
        own["profile"] = profile
    run_id = str(client.create_run(experiment_id, tags={**tags, **own}).info.run_id)
    client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])
    return run_id


def log_final_artifacts(
    client: Any, run_id: str, workspace: Path, *, page: str = REPORT_PAGE
) -> None:
    """Copy report, metrics, gates and plots into the run, and log data and headline.

    The other final numbers are metrics of the stages' runs. A figure is in the headline if the
    report of the run has it: what a closed gate has left behind it is of an earlier run.

    Args:
        page: What the run has written for people, beside the report: another run's is left.
    """
    log_data_input(client, run_id, workspace)
    for name in dict.fromkeys((*FINAL_FILES, page)):
        if (workspace / name).is_file():
            client.log_artifact(run_id, str(workspace / name))
    for name in FINAL_FOLDERS:
        if (workspace / name).is_dir():
            client.log_artifacts(run_id, str(workspace / name), name)
    if (workspace / HEADLINE_FILE).is_file():
        told = read_json(workspace / HEADLINE_FILE)
        files = (workspace / HEADLINE_FILE.parent).glob("*.json")
        metrics = {path.stem: read_json(path) for path in files}
        log_numbers(client, run_id, headline_results(metrics, told))


def headline_results(
    metrics: Mapping[str, Mapping[str, Any]], names: Iterable[str] = tuple(HEADLINE)
) -> dict[str, Any]:
    """Select the headline from the content of ``metrics/NAME.json`` by name, as MLflow has it.

    Each figure has the name and the value that it has in the run of its stage.
    """
    flat = flatten(metrics)
    return {RESULTS + name: flat.get(HEADLINE[name]) for name in names if name in HEADLINE}


def result_name(file: str, name: str) -> str:
    """Return how MLflow calls a figure of ``metrics/FILE.json``, in the run of every stage.

    What the headline has is called as there, other comparisons by who compares.
    """
    path = f"{file}.{name}"
    if path in HEADLINE_NAMES:
        return RESULTS + HEADLINE_NAMES[path]
    return RESULTS + (path.removeprefix(COMPARISON) if path.startswith(COMPARISON) else name)


def log_data_input(client: Any, run_id: str, workspace: Path) -> None:
    """Name the clean data as the dataset of a run, by their hash in DVC, once there is one."""
    lock = workspace / "dvc.lock"
    digest = recorded_outputs(lock).get(CLEAN_DATA) if lock.is_file() else None
    if digest:
        uri = (workspace.resolve() / CLEAN_DATA).as_uri()
        client.log_inputs(run_id, [dataset_input(CLEAN_DATA, digest, uri, "training")])


def dataset_input(name: str, digest: str, uri: str, context: str, rows: str | None = None) -> Any:
    """Make a dataset as MLflow keeps it with each run that reads it.

    The same name and digest are one dataset.

    Args:
        digest: The hash that DVC has for it.
        context: What the run does with it, such as "training".
        rows: How many rows it has, where that is known.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": uri, "dvc": digest})
    profile = json.dumps({"num_rows": int(rows)}) if rows else None
    dataset = Dataset(name, digest[:LONGEST_DIGEST], "local", source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def recorded_params(workspace: Path) -> dict[str, str]:
    """Return params.yaml with dotted names, without what looks like a secret."""
    values = flatten(plain(read(workspace / PARAMS_FILE)))
    return {legal_name(key): redacted(str(value))[:LONGEST_PARAM] for key, value in values.items()}


def log_numbers(
    client: Any, run_id: str, values: Mapping[str, Any], model_id: str | None = None
) -> None:
    """Log the finite numbers among ``values`` as metrics of a run.

    With ``model_id`` they are also those of the logged model.
    """
    from mlflow.entities import Metric
    from mlflow.utils.time import get_current_time_millis

    now = get_current_time_millis()
    numbers = {
        k: float(v) for k, v in values.items() if isinstance(v, int | float) and math.isfinite(v)
    }
    rows = [
        Metric(legal_name(key), value, now, 0, model_id=model_id) for key, value in numbers.items()
    ]
    client.log_batch(run_id, metrics=rows)


# Without it the UI shows its pages on generative AI, traces and judges, until one has chosen model
# training.
MODEL_TRAINING = "?workflowType=machine_learning"


def run_page(experiment_id: str, run_id: str, artifact: str | None = None) -> str:
    """Return the page of a run, or of an artifact of it, relative to the MLflow UI."""
    page = f"#/experiments/{experiment_id}/runs/{run_id}"
    if artifact:
        page += f"/artifacts/{quote(artifact)}"
    return page + MODEL_TRAINING


# What MLflow refuses in the name of a metric, and all others of the request with it. Names have
# categories of the data.
REFUSED = re.compile(r"[^/\w.\- :]|\A/|\A\.(?=\.|/|\Z)|/(?=/|\Z|\.\.?(?:/|\Z))")


def legal_name(name: str) -> str:
    """The name of a metric or parameter with an underscore in place of whatever MLflow refuses."""
    return REFUSED.sub("_", name[:LONGEST_NAME])

"""The run of a pipeline in MLflow: its beginning and end, what came of it, and its stages' records."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flows.registry.client import connect, experiment_id, prepare_tracking, registry_errors
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.tracking.delivery import DEFERRED_VARIABLE, Courier
from rlhf_core.tracking.origin import origin_tags, workspace_tags
from rlhf_core.tracking.pipeline_run import (
    EXPERIMENT_TAG,
    NOTE_TAG,
    PIPELINE_TAG,
    VERDICT_TAG,
    WORKSPACE_ID_TAG,
    end_abandoned,
    open_pipeline_run,
)
from rlhf_core.tracking.stage_run import (
    CLIENT_SETTINGS,
    default_environment,
    tracking_uri,
)

FINAL_STATES = {"completed": "FINISHED", "cancelled": "KILLED"}


def start_pipeline_run(workspace: Path, name: str) -> str:
    """Open the parent run of a pipeline run; returns its id.

    Stages become its children when ``RLHF_PARENT_RUN_ID`` holds that id.
    """
    client, experiment = prepare_tracking(workspace)
    tags = {**workspace_tags(workspace), **origin_tags(workspace, "rlhf run")}
    # The caller holds the workspace's lock: a run of it that goes on is one that was killed. A DVC
    # experiment in a folder of its own does not need the lock.
    unfinished = (
        f"tags.`{WORKSPACE_ID_TAG}` = '{tags[WORKSPACE_ID_TAG]}' and tags.`{PIPELINE_TAG}` = 'true' "
        "and attributes.status = 'RUNNING'"
    )
    for killed in client.search_runs([experiment], unfinished):
        if EXPERIMENT_TAG not in killed.data.tags:
            client.set_terminated(killed.info.run_id, "KILLED")
    end_abandoned(client, experiment, tags[WORKSPACE_ID_TAG])
    return open_pipeline_run(client, experiment, workspace, name, tags)


def end_pipeline_run(run_id: str, status: str, workspace: Path) -> None:
    """Close a run, whose ``status`` is the type of a final state of Prefect."""
    connect(workspace).set_terminated(run_id, FINAL_STATES.get(status.lower(), "FAILED"))


def describe_run(workspace: Path, run_id: str, verdict: str, description: str) -> None:
    """Write what came of the pipeline run ``run_id``.

    Args:
        verdict: The verdict in a few words, a tag of the run.
        description: The verdict with its numbers, in Markdown.
    """
    from mlflow.entities import RunTag

    client = connect(workspace)
    with registry_errors(client, "describe the run"):
        run = client.get_run(run_id)
        client.log_batch(run_id, tags=[RunTag(VERDICT_TAG, verdict), RunTag(NOTE_TAG, description)])
        experiments = [experiment_id(client, workspace)]
        children = client.search_runs(experiments, f"tags.`mlflow.parentRunId` = '{run_id}'")
        config = load_section(workspace, "registry", RegistryConfig)
        about = {
            config.policy: "The policy. Its version @champion is the one that `rlhf chat` talks to.",
            config.reward_model: "The reward model that the policy was optimised against; it judges no policy.",
        }
        for child in children:
            for version in client.search_model_versions(f"run_id = '{child.info.run_id}'"):
                text = f"Registered by the run {run.info.run_name}.\n\n{description}"
                client.update_model_version(version.name, version.version, text)
                latest = f"Latest: version {version.version}, from a run whose verdict on the policy is: {verdict}."
                client.update_registered_model(
                    version.name, f"{about.get(version.name, '')}\n\n{latest}".strip()
                )


logger = logging.getLogger(__name__)
PAUSE_SECONDS = 1.0


@contextmanager
def delivered_records(workspace: Path, tracked: bool) -> Iterator[Mapping[str, str]]:
    """Deliver the records of stages in a thread while the block runs, and the rest when it ends.

    Yields the variables by which stages of this machine, or of one that shares the workspace, leave
    it to this process: none, and nothing is done, where the pipeline's run is not ``tracked`` in
    MLflow.
    """
    if not tracked:
        yield {}
        return
    client = connect(workspace)
    own = experiment_id(client, workspace)
    ended = threading.Event()
    with (
        default_environment(CLIENT_SETTINGS),  # a server that is away holds nothing up for minutes
        Courier(client, lambda: own, workspace, tracking_uri(workspace)) as courier,
    ):

        def deliver_until_the_end() -> None:
            while not ended.wait(PAUSE_SECONDS):
                _try(courier.deliver_new)

        thread = threading.Thread(target=deliver_until_the_end, name="record-delivery", daemon=True)
        thread.start()
        try:
            yield {DEFERRED_VARIABLE: "1"}
        finally:
            ended.set()
            thread.join()
            _try(courier.deliver_rest)


def without_delivery(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for a stage that delivers by itself: this process sees no journal of it."""
    return {name: value for name, value in environment.items() if name != DEFERRED_VARIABLE}


def _try(deliver: Callable[[], None]) -> None:
    """Deliver; an error does not end the run, and what is left waits for the next one."""
    try:
        deliver()
    except Exception:
        logger.exception("records of stages could not be delivered")

"""MLflow for the pipeline: the record and its pages, registered models, runs and their delivery.

A request that fails raises ``RlhfError``, so that it is never mistaken for "there is none".
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from flows.prefect_server.services import client_tls
from flows.registry.workspace import repair_moved, workspace_id
from flows.workspace import locked, run_tags, running_services
from rlhf_core.config.loading import load_params, load_section
from rlhf_core.config.operations import RegistryConfig, TrackingConfig
from rlhf_core.errors import RlhfError, first_line, is_full_disk, named_line
from rlhf_core.tracking import stage_run
from rlhf_core.tracking.delivery import DEFERRED_VARIABLE, Courier, address
from rlhf_core.tracking.pipeline_run import open_pipeline_run
from rlhf_core.tracking.stage_run import (
    CLIENT_SETTINGS,
    default_environment,
    origin_tags,
    record_folder,
    require_database,
    tracking_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


CHALLENGER, CHAMPION, PREVIOUS = "challenger", "champion", "previous"
# Tags of versions: the hash of their files, the reward model behind a policy, and what gates said.
CONTENT_TAG, REWARD_VERSION_TAG = "content_sha256", "reward_model_version"
GATES_TAG, UNGATED_TAG, GATE_REPORT_TAG, CONDITIONS_TAG = (
    "gates",
    "ungated",
    "gate",
    "gate_conditions",
)
GATES_PASSED, GATES_FAILED = "passed", "ungated"
# The tags that promotion relies on, and which are therefore signed.
SIGNED_TAGS = (GATES_TAG, GATE_REPORT_TAG, CONDITIONS_TAG, UNGATED_TAG, REWARD_VERSION_TAG)
UNKNOWN = "RESOURCE_DOES_NOT_EXIST"

# Without it the UI shows its pages on generative AI, traces and judges, until one has chosen model
# training.
MODEL_TRAINING = "?workflowType=machine_learning"
KNOCK_SECONDS = 5.0
# The certificates that MLflow's client trusts; of requests, the last two.
CA_VARIABLES = ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def run_page(experiment_id: str, run_id: str, artifact: str | None = None) -> str:
    """Return the page of a run, or of an artifact of it, relative to the MLflow UI."""
    page = f"#/experiments/{experiment_id}/runs/{run_id}"
    if artifact:
        page += f"/artifacts/{quote(artifact)}"
    return page + MODEL_TRAINING


def mlflow_address(workspace: Path) -> str | None:
    """The server of ``MLFLOW_TRACKING_URI``, or of a running ``rlhf up``; None if there is none.

    A user name and password in the variable are left out.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    if not uri:
        return running_services(workspace).get("mlflow_url")
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return None
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")


WORKSPACE_ID_TAG = "rlhf.workspace_id"
FINAL_STATES = {"completed": "FINISHED", "cancelled": "KILLED"}


# MLflow reads them when it is imported.
MLFLOW_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # A model's requirements are its own, not those of a project in whose folder it was registered.
    "MLFLOW_UV_AUTO_DETECT": "false",
}


def has_record(workspace: Path) -> bool:
    """Whether a workspace has recorded anything: else asking would create a database."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return True
    return (record_folder(workspace) / "mlflow.db").is_file()


def connect(workspace: Path) -> MlflowClient:
    """A client of the workspace's record; ``RlhfError`` at once if that does not answer.

    The record of a workspace that was moved or copied names its present folder from then on.
    """
    for name, value in MLFLOW_SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    # It prints a traceback of what is raised too.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    uri = tracking_uri(workspace)
    require_database(uri)
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        repair_moved(record_folder(workspace))
    try:
        if uri.startswith(("http://", "https://")):
            knock(uri)  # MLflow itself would try for minutes
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    except ssl.SSLCertVerificationError as error:
        raise RlhfError(
            f"the certificate of MLflow at {address(uri)} is not trusted ({first_line(error)}); name the file of its "
            f"certificate authority in {CA_VARIABLES[0]}"
        ) from error
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if is_full_disk(error):
            raise RlhfError(
                f"no room for the record {uri} ({first_line(error)}); make some"
            ) from error
        raise RlhfError(
            f"MLflow at {address(uri)} does not answer ({first_line(error)}); start it, or unset MLFLOW_TRACKING_URI"
        ) from error
    return client


def knock(url: str) -> None:
    """Raise ``OSError`` if nothing listens at the host and port of ``url``, as which
    ``ssl.SSLCertVerificationError`` counts too: its certificate is not trusted.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((host, port), timeout=KNOCK_SECONDS) as connection:
        if parts.scheme == "https":
            tls = client_tls(CA_VARIABLES, "MLFLOW_TRACKING_INSECURE_TLS")
            if own := os.environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH"):
                tls.load_cert_chain(own)
            tls.wrap_socket(connection, server_hostname=host).close()


def prepare_tracking(workspace: Path) -> MlflowClient:
    """Make schema and experiment before several processes use them; returns a client.

    Two processes that create the schema at once fail with "duplicate column name", hence the lock.
    What stages have recorded while the server was away is delivered now.
    """
    with locked(workspace, "mlflow.lock", wait=True):
        client = connect(workspace)
        own = experiment_id(client, workspace)
    Courier(client, lambda: own, workspace, tracking_uri(workspace)).deliver_waiting()
    return client


def start_pipeline_run(workspace: Path, name: str) -> str:
    """Open the parent run of a pipeline run; returns its id.

    Stages become its children when ``RLHF_PARENT_RUN_ID`` holds that id.
    """
    client = prepare_tracking(workspace)
    labels = run_tags(workspace, load_params(workspace).profile)
    own = {
        "mlflow.runName": name,
        "rlhf.workspace": workspace.resolve().name,
        WORKSPACE_ID_TAG: workspace_id(workspace),
    }
    tags = {**labels, **own, **origin_tags(workspace, "rlhf run")}
    return open_pipeline_run(client, experiment_id(client, workspace), workspace, tags)


def end_pipeline_run(run_id: str, status: str, workspace: Path) -> None:
    """Close a run, whose ``status`` is the type of a final state of Prefect."""
    connect(workspace).set_terminated(run_id, FINAL_STATES.get(status.lower(), "FAILED"))


@contextmanager
def fluent(workspace: Path) -> Iterator[None]:
    """Point MLflow's module-level functions (``mlflow.pyfunc``) at the workspace for the block.

    ``mlflow.set_tracking_uri`` also sets the environment variable, which would otherwise read as
    the user's choice for every later workspace of this process.
    """
    import mlflow

    names = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID")
    before = {name: os.environ.get(name) for name in names}
    uri = tracking_uri(workspace)
    try:
        os.environ.pop("MLFLOW_RUN_ID", None)  # the run that a user's own script goes on with
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        yield
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
        mlflow.set_registry_uri(None)  # type: ignore[arg-type]
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def experiment_id(client: MlflowClient, workspace: Path) -> str:
    """Id of the experiment of a workspace, made on first use."""
    return stage_run.experiment_id(
        client, workspace, load_section(workspace, "tracking", TrackingConfig).experiment
    )


@contextmanager
def registry_errors(action: str) -> Iterator[None]:
    """Turn an error of MLflow in the block into a one-line ``RlhfError`` that names ``action``."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        # MLflow does not wrap all errors of its database.
        raise RlhfError(
            f"the model registry could not {action} {reason_and_remedy(error)}"
        ) from error


def reason_and_remedy(error: Exception) -> str:
    """What MLflow, its database or a disk said, in brackets, and what to do about it."""
    remedy = "try again when it answers"
    if is_full_disk(error):
        remedy = "make room and run the command again"
    return f"({named_line(error)}); {remedy}"


def registered_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """The registered model ``name``; None if the registry knows no such model."""
    from mlflow.exceptions import MlflowException

    with registry_errors(f"look up {name}"):
        try:
            return client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code == UNKNOWN:
                return None
            raise


def read_aliases(client: MlflowClient, name: str) -> dict[str, str]:
    """Version numbers by alias of the registered model ``name``; empty for an unknown one."""
    return aliases_of(registered_model(client, name))


def aliases_of(model: RegisteredModel | None) -> dict[str, str]:
    """Version numbers by alias of a model that was looked up; empty for an unknown one."""
    if model is None:
        return {}
    return {alias: str(version) for alias, version in model.aliases.items()}


def get_version(client: MlflowClient, name: str, number: str) -> ModelVersion:
    """Version ``number`` of a registered model; ``RlhfError`` if there is none."""
    from mlflow.exceptions import MlflowException

    with registry_errors(f"look up {name} version {number}"):
        try:
            return client.get_model_version(name, number)
        except MlflowException as error:
            if error.error_code == UNKNOWN or not str(number).isdecimal():
                raise RlhfError(
                    f"{name} has no version {number}; `rlhf status` shows what there is"
                ) from error
            raise


def versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a registered model, newest first; none when the model is unknown."""
    listed: list[ModelVersion] = []
    token: str | None = None
    while True:
        with registry_errors(f"list the versions of {name}"):
            page = client.search_model_versions(f"name='{name}'", max_results=200, page_token=token)
        listed += list(page)
        token = page.token
        if not token:
            return sorted(listed, key=lambda version: int(version.version), reverse=True)


def version_numbers(client: MlflowClient, name: str) -> set[str]:
    """The numbers of the versions that a model has now; MLflow lets anyone delete one."""
    return {str(version.version) for version in versions(client, name)}


NOTE_TAG = "mlflow.note.content"
VERDICT_TAG = "verdict"


def describe_run(workspace: Path, run_id: str, verdict: str, description: str) -> None:
    """Write what came of the pipeline run ``run_id``.

    Args:
        verdict: The verdict in a few words, a tag of the run.
        description: The verdict with its numbers, in Markdown.
    """
    from mlflow.entities import RunTag

    client = connect(workspace)
    with registry_errors("describe the run"):
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

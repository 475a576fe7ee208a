"""MLflow for a workspace: its record and pages, and registered models.

A request that fails raises ``RlhfError``, so that it is never mistaken for "there is none".
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import sqlite3
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from flows.prefect_server.services import client_tls
from flows.workspace import locked, ownership, printed_line, running_services
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import TrackingConfig
from rlhf_core.errors import RlhfError, first_line, is_full_disk, named_line
from rlhf_core.redaction import redacted
from rlhf_core.storage.files import full_disks, temporary_root
from rlhf_core.tracking import stage_run
from rlhf_core.tracking.delivery import Courier, address
from rlhf_core.tracking.origin import record_folder
from rlhf_core.tracking.stage_run import (
    database_file,
    require_database,
    tracking_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


CHALLENGER, CHAMPION, PREVIOUS = "challenger", "champion", "previous"
# Tags of versions: the hash of their files, the reward model behind a policy, and what gates said.
CONTENT_TAG, REWARD_VERSION_TAG = "content_sha256", "reward_model_version"
GATES_TAG, UNGATED_TAG = "gates", "ungated"
GATE_REPORT_TAG, CONDITIONS_TAG = "gate", "gate_conditions"
GATES_PASSED, GATES_FAILED = "passed", "ungated"
# The tags that promotion relies on, and which are therefore signed.
SIGNED_TAGS = (GATES_TAG, GATE_REPORT_TAG, CONDITIONS_TAG, UNGATED_TAG, REWARD_VERSION_TAG)
OWNER_TAG = "rlhf.owner"  # of a registered model
UNKNOWN = "RESOURCE_DOES_NOT_EXIST"

KNOCK_SECONDS = 5.0
# The certificates that MLflow's client trusts; of requests, the last two.
CA_VARIABLES = ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


# Options of a database's address that say which database it is, as host, path and port do.
PLACE_OPTIONS = (
    "host", "hostaddr", "port", "dbname", "database", "service", "options", "unix_socket", "odbc_connect",
)  # fmt: skip
LOGIN_OF_ODBC = re.compile(
    r"(?i)(?:^|;)\s*(?:uid|user|user id|pwd|password)\s*=(?:\{[^}]*\}|[^;]*)"
)


def registry_address(workspace: Path) -> str:
    """What tells registries apart: the address, without user, password and most options.

    That of a SQLite database is its path. What is masked in another address is told by its hash,
    so that two of them never read alike.
    """
    from sqlalchemy.engine import make_url

    uri = tracking_uri(workspace)
    if uri.startswith("sqlite"):
        return f"sqlite:///{Path(make_url(uri).database or '').resolve()}"
    parts = urlsplit(uri)
    places = []
    for name, value in parse_qsl(parts.query):
        if name in PLACE_OPTIONS and parts.scheme not in ("http", "https"):
            places.append((name, LOGIN_OF_ODBC.sub("", value)))
    server = parts.netloc.rpartition("@")[2]
    place = parts._replace(netloc=server, path=parts.path.rstrip("/"), fragment="")
    plain = urlunsplit(place._replace(query=urlencode(sorted(places))))
    shown = redacted(plain)
    if shown == plain:
        return plain
    return f"{shown}#{hashlib.sha256(plain.encode()).hexdigest()[:16]}"


def registry_of_record(workspace: Path) -> str:
    """The registry as a file of the workspace names it: its own one stays so where both move."""
    own = record_folder(workspace)
    return registry_address(workspace).replace(f"sqlite:///{own}/", "sqlite:///", 1)


SHOWN_OF_TAG = 300


def tag_line(tags: Mapping[str, str], key: str) -> str:
    """Return what a tag says as one line to show; empty without one.

    Whoever can write to the registry may have written anything there.
    """
    text = printed_line(str(tags.get(key, "")))
    return text if len(text) <= SHOWN_OF_TAG else f"{text[:SHOWN_OF_TAG]}…"


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
    # It warns that what is installed is not the wheel of the model, which is made of it.
    logging.getLogger("mlflow.utils.requirements_utils").setLevel(logging.ERROR)
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


def prepare_tracking(workspace: Path) -> tuple[MlflowClient, str]:
    """Make schema and experiment before several processes use them.

    Two processes that create the schema at once fail with "duplicate column name", hence the lock.
    What stages have recorded while the server was away is delivered now.

    Returns:
        A client, and the id of the experiment.
    """
    with locked(workspace, "mlflow.lock", wait=True):
        client = connect(workspace)
        own = experiment_id(client, workspace)
    Courier(client, lambda: own, workspace, tracking_uri(workspace)).deliver_waiting()
    return client, own


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
def registry_errors(client: MlflowClient, action: str) -> Iterator[None]:
    """Turn an error of MLflow in the block into a one-line ``RlhfError`` that names ``action``."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        # MLflow does not wrap all errors of its database.
        raise RlhfError(
            f"the model registry could not {action} {reason_and_remedy(client, error)}"
        ) from error


def reason_and_remedy(client: MlflowClient, error: Exception) -> str:
    """What MLflow, its database or a disk said, in brackets, and what to do about it."""
    said = f"({named_line(error)})"
    # SQLite names neither its file nor the disk; a model is packed in the temporary folder first.
    record = database_file(client.tracking_uri)
    places = [temporary_root()] if record is None else [record, temporary_root()]
    full = full_disks(*places)
    # Of a download that finds no room MLflow says that the path is wrong.
    if is_full_disk(error) or (full and "Failed to download" in str(error)):
        return f"{said}{full}; make room and run the command again"
    if getattr(error, "error_code", "") == UNKNOWN:
        return f"{said}; it was deleted there: restore it from a backup"
    return f"{said}; try again when it answers"


def registered_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """The registered model ``name``; None if the registry knows no such model."""
    from mlflow.exceptions import MlflowException

    with registry_errors(client, f"look up {name}"):
        try:
            model = client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code == UNKNOWN:
                return None
            raise
    if model.name != name:
        raise RlhfError(
            f"asked for {name}, the model registry answers with {printed_line(model.name)}, which it takes for the "
            "same name; give registry.policy and registry.reward_model names that differ in more"
        )
    return model


def read_aliases(client: MlflowClient, name: str) -> dict[str, str]:
    """Version numbers by alias of the registered model ``name``; empty for an unknown one."""
    return aliases_of(registered_model(client, name))


def aliases_of(model: RegisteredModel | None) -> dict[str, str]:
    """Version numbers by alias of a model that was looked up; empty for an unknown one."""
    if model is None:
        return {}
    return {alias: str(version) for alias, version in model.aliases.items()}


def get_version(client: MlflowClient, name: str, number: str) -> ModelVersion:
    """Version ``number`` of a registered model; ``RlhfError`` if there is none, or if the registry
    answers with another one.
    """
    from mlflow.exceptions import MlflowException

    with registry_errors(client, f"look up {name} version {number}"):
        try:
            version = client.get_model_version(name, number)
        except MlflowException as error:
            if error.error_code == UNKNOWN or not str(number).isdecimal():
                raise RlhfError(
                    f"{name} has no version {number}; `rlhf status` shows what there is"
                ) from error
            raise
    if (version.name, int(version.version)) != (name, int(number)):
        raise RlhfError(
            f"asked for {name} version {number}, the model registry answers with {printed_line(version.name)} version "
            f"{version.version}; it is not used"
        )
    return version


def versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a registered model, newest first; none when the model is unknown.

    Some databases also find names that differ in case, accents or spaces at the end.
    """
    listed: list[ModelVersion] = []
    token: str | None = None
    while True:
        with registry_errors(client, f"list the versions of {name}"):
            page = client.search_model_versions(f"name='{name}'", max_results=200, page_token=token)
        listed += [version for version in page if version.name == name]
        token = page.token
        if not token:
            return sorted(listed, key=lambda version: int(version.version), reverse=True)


def version_numbers(client: MlflowClient, name: str) -> set[str]:
    """The numbers of the versions that a model has now; MLflow lets anyone delete one."""
    return {str(version.version) for version in versions(client, name)}


LOGGER = logging.getLogger(__name__)
ARTIFACTS, DATABASE = "mlartifacts", "mlflow.db"
PLACES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}


def repair_moved(workspace: Path) -> Path | None:
    """Let ``mlflow.db`` name the folder of ``workspace``; returns another one that it named.

    A copy whose original is still there becomes a workspace of its own, which owns the models in
    its own database.

    Raises:
        RlhfError: The database cannot be changed. Nothing was.
    """
    workspace = workspace.resolve()
    database = workspace / DATABASE
    if not database.is_file():
        return None
    try:
        with closing(sqlite3.connect(database, timeout=60)) as connection:
            earlier = _earlier_folder(connection, workspace)
            if earlier is None:
                return None
            with connection:
                _rename(connection, earlier, workspace)
    except sqlite3.Error as error:
        raise RlhfError(
            f"{database} names artifacts in another folder and cannot be repaired ({error})"
        ) from error
    LOGGER.warning(
        "%s was made in %s: its record of models and runs names the present folder now",
        workspace,
        earlier,
    )
    return earlier


def _earlier_folder(connection: sqlite3.Connection, workspace: Path) -> Path | None:
    """The folder that experiments of this database name, None if that is the workspace.

    A folder without a database is another workspace, whose runs this one records.
    """
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
        return None
    rows = connection.execute("SELECT artifact_location FROM experiments").fetchall()
    for (location,) in rows:
        if not str(location).startswith("file:"):
            continue
        place = Path(unquote(urlsplit(location).path))
        folder = place.parent
        is_other = place.name == ARTIFACTS and folder != workspace
        if is_other and (not folder.exists() or (folder / DATABASE).exists()):
            return folder
    return None


def _rename(connection: sqlite3.Connection, earlier: Path, workspace: Path) -> None:
    """Replace the folder at the beginning of every place, and in the tag of the owner."""
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    known = {name for (name,) in tables}
    names = ((earlier.as_uri(), workspace.as_uri()), (str(earlier), str(workspace)))
    for table, columns in PLACES.items():
        if table not in known:
            continue
        for column in columns:
            change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
            for old, new in names:
                connection.execute(change, (new, len(old) + 1, len(old) + 1, f"{old}/"))
    connection.execute(
        "UPDATE registered_model_tags SET value = ? WHERE key = ? AND value LIKE ?",
        (ownership(workspace), OWNER_TAG, f"% {earlier}"),
    )

"""The services that a run uses: its own on loopback, or those that environment variables name."""

from __future__ import annotations

import os
from collections.abc import Iterator

from flows.commands.checks import FAIL, OK, WARN, DoctorCheck
from flows.prefect_server.services import LOOPBACK, free_port
from flows.registry.client import knock


def service_checks() -> Iterator[DoctorCheck]:
    """Check ports, Prefect, MLflow and the model hub."""
    yield _ports()
    yield _prefect()
    yield _mlflow()
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "TRUE"):
        yield DoctorCheck(OK, "hub", "offline (HF_HUB_OFFLINE): hub ids load from the local cache only")


def _ports() -> DoctorCheck:
    try:
        port = free_port()
    except OSError as error:
        remedy = "allow this user to listen on the loopback address"
        return DoctorCheck(FAIL, "ports", f"cannot listen on {LOOPBACK} ({error.strerror})", remedy)
    return DoctorCheck(OK, "ports", f"free ones on {LOOPBACK}, for example {port}")


def _prefect() -> DoctorCheck:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return DoctorCheck(OK, "prefect api", "embedded: `rlhf run` starts a server of its own")
    import httpx

    try:
        response = httpx.get(f"{url.rstrip('/')}/health", timeout=5)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        finding = f"PREFECT_API_URL={url} does not answer ({str(error) or type(error).__name__})"
        return DoctorCheck(FAIL, "prefect api", finding, "start that server, or unset PREFECT_API_URL")
    if response.status_code == 200:
        return DoctorCheck(OK, "prefect api", f"{url} answers")
    finding = f"PREFECT_API_URL={url} answers /health with status {response.status_code}"
    return DoctorCheck(WARN, "prefect api", finding, "the address must end in /api; check it and PREFECT_API_KEY")


def _mlflow() -> DoctorCheck:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return DoctorCheck(OK, "mlflow", "SQLite in the workspace")
    if not uri.startswith(("http://", "https://")):
        return DoctorCheck(OK, "mlflow", uri)
    try:
        knock(uri)
    except (OSError, ValueError) as error:
        finding = f"MLFLOW_TRACKING_URI={uri} does not answer ({error})"
        return DoctorCheck(FAIL, "mlflow", finding, "start that server, or unset MLFLOW_TRACKING_URI")
    return DoctorCheck(OK, "mlflow", f"{uri} answers")

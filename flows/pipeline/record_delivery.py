"""The pipeline's process delivers to MLflow what its stages record, so that none of them loads MLflow itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flows.registry.mlflow_client import connect, experiment_id, tracking_uri
from rlhf_core.tracking.client_settings import CLIENT_SETTINGS, default_environment
from rlhf_core.tracking.courier import DEFERRED_VARIABLE, Courier

logger = logging.getLogger(__name__)
PAUSE_SECONDS = 1.0


@contextmanager
def delivered_records(workspace: Path, tracked: bool) -> Iterator[Mapping[str, str]]:
    """Deliver the records of stages while the block runs, in a thread, and what is left when it ends.

    Yields the variables by which stages of this machine, or of one that shares the workspace, leave it to this process:
    none, and nothing is done, where the pipeline's run is not ``tracked`` in MLflow.
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
        thread = threading.Thread(target=_deliver_until, args=(courier, ended), name="record-delivery", daemon=True)
        thread.start()
        try:
            yield {DEFERRED_VARIABLE: "1"}
        finally:
            ended.set()
            thread.join()
            _try(courier.deliver_rest)


def without_delivery(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for a stage whose journal this process does not see, and which therefore delivers by itself."""
    return {name: value for name, value in environment.items() if name != DEFERRED_VARIABLE}


def _deliver_until(courier: Courier, ended: threading.Event) -> None:
    while not ended.wait(PAUSE_SECONDS):
        _try(courier.deliver_new)


def _try(deliver: Callable[[], None]) -> None:
    """Deliver. An error must not end a run whose stages have done their work: what is left waits for the next one."""
    try:
        deliver()
    except Exception:
        logger.exception("records of stages could not be delivered")

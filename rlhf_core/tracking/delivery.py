"""Delivery of records to MLflow in few requests, and what its errors mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rlhf_core.errors import named_line
from rlhf_core.redaction import redacted
from rlhf_core.storage.files import LockFile
from rlhf_core.tracking.journal import JOURNAL_TAG, Journal, JournalRecord, waiting_journals

logger = logging.getLogger(__name__)
# How much one request takes, by MLflow's limits.
MOST = {"metrics": 1000, "params": 100, "tags": 100, "artifact": 1, "end": 1}
LONGEST_PARAM = 500
ACCESS_DENIED = frozenset({401, 403})
NOT_FINAL = frozenset({408, 425, 429})
# Held by the process that delivers a workspace's records for as long as it does.
DELIVERY_LOCK = Path(".rlhf") / "tracking.lock"


class ServerAway(Exception):
    """MLflow cannot take records now, but may later; the text is the reason in one line."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


@contextmanager
def away_errors() -> Iterator[None]:
    """Raise :class:`ServerAway` for errors of the block that may go away by themselves; others pass.

    Those are a server that does not answer, answers with an error of its own, or asks to wait, a locked database, and a
    login that is not accepted any more.
    """
    from mlflow.exceptions import MlflowException
    from requests import HTTPError, RequestException

    try:
        yield
    except (MlflowException, RequestException) as error:
        status = None
        if isinstance(error, MlflowException):
            status = error.get_http_status_code()
        elif isinstance(error, HTTPError) and error.response is not None:
            status = error.response.status_code
        if status is not None and 400 <= status < 500 and status not in ACCESS_DENIED | NOT_FINAL:
            raise
        raise ServerAway(redacted(" ".join(str(error).split()))[:200], status) from error


def address(uri: str) -> str:
    """The address of a server without name and password."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def requests_for(records: Sequence[JournalRecord]) -> Iterator[Callable[[Any, str], object]]:
    """Functions of client and run id that send ``records`` in order, in as few requests as MLflow allows."""
    from mlflow.entities import Metric, Param, RunTag

    for kind, group in groupby(records, lambda record: record.kind):
        items = [(record, name, value) for record in group for name, value in record.values.items()]
        batches = [items[start : start + MOST[kind]] for start in range(0, len(items), MOST[kind])]
        for batch in batches:
            if kind == "metrics":
                metrics = [Metric(name, value, record.time, record.step) for record, name, value in batch]
                yield partial(_log_batch, metrics=metrics)
            elif kind == "params":
                yield partial(_log_batch, params=[Param(name, str(v)[:LONGEST_PARAM]) for _, name, v in batch])
            elif kind == "tags":
                yield partial(_log_batch, tags=[RunTag(name, str(value)) for _, name, value in batch])
            elif kind == "artifact":
                [(_, file, folder)] = batch
                yield partial(_log_artifact, file=file, folder=folder)
            else:
                [(record, _, status)] = batch
                yield partial(_end_run, status=status, time=record.time)


def _log_batch(client: Any, run_id: str, **rows: Any) -> None:
    client.log_batch(run_id, **rows)


def _log_artifact(client: Any, run_id: str, file: str, folder: str | None) -> None:
    client.log_artifact(run_id, file, folder)


def _end_run(client: Any, run_id: str, status: str, time: int) -> None:
    client.set_terminated(run_id, status, time)


def make_run(client: Any, experiment_id: Callable[[], str], journal: Journal) -> str:
    """Make the run of ``journal`` unless the server has; returns its id.

    Raises:
        ServerAway: There is no run yet.
    """
    if journal.header.run_id is None:
        with away_errors():
            experiment = experiment_id()
            # A process that was killed may have made the run without noting it.
            before = client.search_runs([experiment], _of_journal(journal)) if journal.is_on_disk else []
            run = before[0] if before else client.create_run(experiment, journal.header.started, journal.header.tags)
        journal.assign_run(str(run.info.run_id))
    assert journal.header.run_id is not None
    return journal.header.run_id


def _of_journal(journal: Journal) -> str:
    return f"tags.`{JOURNAL_TAG}` = '{journal.folder.name}'"


def finish(client: Any, journal: Journal) -> None:
    """Delete the journal of a stage that has ended and whose records have arrived. A killed stage's run has failed.

    Raises:
        ServerAway: The journal stays as it was.
    """
    if not journal.has_end():
        with _refusals_logged(journal):
            client.set_terminated(journal.header.run_id, "FAILED")
    journal.delete()


def send(client: Any, experiment_id: Callable[[], str], journal: Journal) -> list[JournalRecord]:
    """Send what waits in ``journal``, whose stage may be running, and return it.

    A record that the server refuses for good is dropped, with a warning.

    Raises:
        ServerAway: The journal stays as it was.
    """
    records, position = journal.undelivered()
    run_id = make_run(client, experiment_id, journal)
    for request in requests_for(records):
        with _refusals_logged(journal):
            request(client, run_id)
    if records:
        journal.mark_delivered(position)
    return records


@contextmanager
def _refusals_logged(journal: Journal) -> Iterator[None]:
    """Go on, with a warning, after a request that the server refuses for good, or a file that cannot be stored."""
    try:
        with away_errors():
            yield
    except ServerAway:
        raise
    except Exception as error:  # stores of artifacts have errors of their own
        logger.warning("MLflow refused records of run %s: %s", journal.header.run_id, named_line(error))


def deliver_waiting(client: Any, experiment_id: Callable[[], str], workspace: Path, uri: str) -> int:
    """Send what earlier runs of ``workspace`` have left undelivered; returns how many records those were.

    Records of a run that the server at another address made stay where they are. If the server goes away meanwhile,
    the rest waits on. Nothing is done while another process delivers the workspace's records.
    """
    delivered = 0
    with LockFile(workspace / DELIVERY_LOCK) as lock:
        if not lock.try_acquire():
            return 0
        for journal in waiting_journals(workspace):
            if journal.header.run_id is not None and journal.header.server != address(uri):
                continue
            try:
                delivered += len(send(client, experiment_id, journal))
                finish(client, journal)
            except ServerAway:
                break
    if delivered:
        logger.warning("delivered %d records of earlier runs that MLflow was away for", delivered)
    return delivered

"""Delivery of records to MLflow: what its errors mean, when to try again, and who delivers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rlhf_core.errors import is_full_disk, named_line
from rlhf_core.redaction import redacted
from rlhf_core.storage.files import LockFile
from rlhf_core.tracking.journal import (
    JOURNAL_TAG,
    Journal,
    JournalRecord,
    journals,
    waiting_journals,
    waiting_records,
)
from rlhf_core.tracking.pipeline_run import (
    EXPERIMENT_TAG,
    LONGEST_PARAM,
    PARENT_TAG,
    dataset_input,
    experiment_run,
    follow_stage,
)

logger = logging.getLogger(__name__)
# How much one request takes, by MLflow's limits.
MOST = {"metrics": 1000, "params": 100, "tags": 100, "datasets": 100, "artifact": 1, "end": 1}
REASONS_SHOWN = 3  # of many refusals
FORBIDDEN = 403
ACCESS_DENIED = frozenset({401, FORBIDDEN})
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
    """Raise :class:`ServerAway` for errors that may go away by themselves; others pass.

    Those are a server that does not answer, answers with an error of its own, or asks to wait, a
    locked database, a full disk, and a login that is not accepted any more.
    """
    from mlflow.exceptions import MlflowException
    from requests import HTTPError, RequestException

    logging.getLogger("mlflow.store.db.utils").setLevel(
        logging.CRITICAL
    )  # it prints a traceback of what is raised too
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
    except OSError as error:  # of a store of artifacts in a folder
        if not is_full_disk(error):
            raise
        raise ServerAway(named_line(error)) from error


def address(uri: str) -> str:
    """The address of a server or database without name, password and other secrets."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        # Putting one together again would take slashes from sqlite:////srv/mlflow.db.
        return redacted(uri)
    return redacted(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])))


FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds between two attempts to reach the server
# A server that does not even refuse costs each attempt its timeout; no more than a fifth of the
# time goes there.
PAUSE_PER_ATTEMPT = 4.0
DEFERRED_VARIABLE = (
    "RLHF_TRACKING_DEFERRED"  # set for stages by the process that delivers their records
)


class Courier:
    """Sends a workspace's journals through one client, and rests while its server is away.

    It is entered for as long as stages run with ``RLHF_TRACKING_DEFERRED``, which then neither load
    MLflow nor wait for its server. Meanwhile no other process delivers what earlier runs left.
    Journals of stages that deliver for themselves, each through a courier of its own, are left
    alone.
    """

    def __init__(
        self,
        client: Any,
        experiment_id: Callable[[], str],
        workspace: Path,
        uri: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client, self.experiment_id, self.workspace, self.clock = (
            client,
            experiment_id,
            workspace,
            clock,
        )
        self.server, self.lock = address(uri), LockFile(workspace / DELIVERY_LOCK)
        self.away, self.sent = False, 0
        self.ended: set[Path] = set()  # journals whose last record has arrived
        self._pause, self._next_attempt = FIRST_PAUSE, 0.0

    def __enter__(self) -> Courier:
        self.lock.__enter__()
        self.lock.acquire()
        return self

    def __exit__(self, *error: Any) -> None:
        self.lock.__exit__(*error)

    @property
    def is_due(self) -> bool:
        """Whether the server may be asked again: pauses double while attempts fail."""
        return self.clock() >= self._next_attempt

    @contextmanager
    def attempt(self, pause: float = 0.0) -> Iterator[None]:
        """Deliver in the block, and ``pause`` seconds later again at the earliest.

        A server that is away ends the block, not the caller: what was not sent waits.
        """
        started, self.sent = self.clock(), 0
        try:
            yield
        except ServerAway as error:
            if not self.away:
                logger.warning(
                    "MLflow at %s is away (%s): records wait in .rlhf/tracking and are delivered when it answers; "
                    "the stage goes on",
                    self.server, error,
                )  # fmt: skip
            self.away = True
            self._next_attempt = self.clock() + max(
                self._pause, PAUSE_PER_ATTEMPT * (self.clock() - started)
            )
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            if self.away:
                logger.warning(
                    "MLflow at %s answers again; %d records were delivered", self.server, self.sent
                )
            self.away, self._pause, self._next_attempt = False, FIRST_PAUSE, self.clock() + pause

    def make_run(self, journal: Journal) -> str:
        """Make the run of ``journal`` unless the server has; returns its id.

        Raises:
            ServerAway: There is no run yet.
        """
        if journal.header.run_id is None:
            header, own = journal.header, f"tags.`{JOURNAL_TAG}` = '{journal.folder.name}'"
            tags = dict(header.tags)
            with away_errors():
                experiment = self.experiment_id()
                if EXPERIMENT_TAG in tags:
                    tags[PARENT_TAG] = experiment_run(self.client, experiment, self.workspace, tags)
                # A process that was killed may have made the run without noting it.
                before = self.client.search_runs([experiment], own) if journal.is_on_disk else []
                run = (
                    before[0]
                    if before
                    else self.client.create_run(experiment, header.started, tags)
                )
            journal.assign_run(str(run.info.run_id), tags)
        assert journal.header.run_id is not None
        return journal.header.run_id

    def send(self, journal: Journal) -> list[JournalRecord]:
        """Send what waits in ``journal``, whose stage may be running, and return it.

        A value that the server refuses for good is dropped, with a warning.

        Raises:
            ServerAway: The journal stays as it was.
        """
        records, position = journal.undelivered()
        run_id = self.make_run(journal)
        refused = []
        for kind, batch in batches(records):
            refused += refusals(self.client, run_id, kind, batch)
        _log_refusals(run_id, refused)
        if records:
            journal.mark_delivered(position)
        self.sent += len(records)
        return records

    def finish(self, journal: Journal) -> None:
        """Delete the journal of a stage that has ended and whose records have arrived.

        The run of a killed stage is marked as failed.

        Raises:
            ServerAway: The journal stays as it was.
        """
        status = journal.end_status()
        if status is None:
            status, run_id = "FAILED", str(journal.header.run_id)
            ended = JournalRecord("end", {"status": status})
            _log_refusals(run_id, refusals(self.client, run_id, "end", [(ended, "status", status)]))
        tags = journal.header.tags
        if EXPERIMENT_TAG in tags:
            try:
                with away_errors():
                    stage_run = str(journal.header.run_id)
                    follow_stage(self.client, self.workspace, stage_run, tags, status)
            except ServerAway:
                raise
            except Exception as error:  # stores of artifacts have errors of their own
                logger.warning("the run of the experiment is incomplete: %s", named_line(error))
        journal.delete()

    def is_elsewhere(self, journal: Journal) -> bool:
        """Whether the server at another address made the run."""
        return journal.header.run_id is not None and journal.header.server != self.server

    def deliver_waiting(self) -> int:
        """Send what earlier runs have left undelivered; return how many records those were.

        Records of a run that the server at another address made stay where they are. If the server
        goes away meanwhile, the rest waits on. Nothing is done while another process delivers the
        workspace's records.
        """
        with self.lock, suppress(ServerAway):
            for journal in waiting_journals(self.workspace) if self.lock.try_acquire() else ():
                if not self.is_elsewhere(journal):
                    self.send(journal)
                    self.finish(journal)
        if self.sent:
            logger.warning(
                "delivered %d records of earlier runs that MLflow was away for", self.sent
            )
        return self.sent

    def deliver_new(self) -> None:
        """Send what is new, and delete the journals of stages that have ended.

        Nothing happens while the server rests.
        """
        if self.is_due:
            self._deliver(journals(self.workspace))

    def deliver_rest(self) -> None:
        """Send what is left once all stages have ended, those among them that were killed, too."""
        waiting = journals(self.workspace)
        self.ended |= {journal.folder for journal in waiting}
        self._deliver(waiting)
        if count := waiting_records(self.workspace):
            logger.warning(
                "%d records wait for MLflow to answer again; the next run delivers them", count
            )

    def _deliver(self, waiting: list[Journal]) -> None:
        with self.attempt():
            for journal in waiting:
                if not journal.header.deferred or self.is_elsewhere(journal):
                    continue
                journal.header = replace(journal.header, server=self.server)
                if any(record.kind == "end" for record in self.send(journal)):
                    self.ended.add(journal.folder)
                if journal.folder in self.ended and journal.try_lock():
                    try:
                        self.finish(journal)
                    finally:
                        journal.release()


Item = tuple[JournalRecord, str, Any]  # a record, the name of one of its values, and that value


def batches(records: Sequence[JournalRecord]) -> Iterator[tuple[str, list[Item]]]:
    """The values of ``records`` in order, in as few parts of one kind as MLflow allows requests."""
    for kind, group in groupby(records, lambda record: record.kind):
        items: list[Item] = []
        for record in group:
            items += [(record, name, value) for name, value in record.values.items()]
        for start in range(0, len(items), MOST[kind]):
            yield kind, items[start : start + MOST[kind]]


def refusals(client: Any, run_id: str, kind: str, batch: Sequence[Item]) -> list[str]:
    """Send a batch; return why the server refuses some of it for good, or cannot store a file.

    MLflow refuses a request as a whole for one value in it. Its halves are sent then, so that only
    that value is lost; not where the run takes none, because somebody deleted it.

    Raises:
        ServerAway: A part may have arrived.
    """
    try:
        with away_errors():
            _post(client, run_id, kind, batch)
    except ServerAway:
        raise
    except Exception as error:  # stores of artifacts have errors of their own
        if len(batch) == 1 or not _is_active(client, run_id):
            return [named_line(error)] * len(batch)
        middle = len(batch) // 2
        first_half = refusals(client, run_id, kind, batch[:middle])
        return first_half + refusals(client, run_id, kind, batch[middle:])
    return []


def _is_active(client: Any, run_id: str) -> bool:
    from mlflow.entities import LifecycleStage
    from mlflow.exceptions import MlflowException

    try:
        with away_errors():
            return bool(client.get_run(run_id).info.lifecycle_stage == LifecycleStage.ACTIVE)
    except MlflowException:  # deleted for good
        return False


def _post(client: Any, run_id: str, kind: str, batch: Sequence[Item]) -> None:
    from mlflow.entities import Metric, Param, RunTag

    record, name, value = batch[0]
    if kind == "metrics":
        metrics = [Metric(name, value, record.time, record.step) for record, name, value in batch]
        client.log_batch(run_id, metrics=metrics)
    elif kind == "params":
        client.log_batch(
            run_id, params=[Param(name, str(value)[:LONGEST_PARAM]) for _, name, value in batch]
        )
    elif kind == "tags":
        client.log_batch(run_id, tags=[RunTag(name, str(value)) for _, name, value in batch])
    elif kind == "datasets":
        client.log_inputs(run_id, [dataset_input(name, **facts) for _, name, facts in batch])
    elif kind == "artifact":
        client.log_artifact(run_id, name, value)
    else:
        client.set_terminated(run_id, value, record.time)


def _log_refusals(run_id: str, reasons: Sequence[str]) -> None:
    if reasons:
        shown = "; ".join([*dict.fromkeys(reasons)][:REASONS_SHOWN])
        logger.warning(
            "MLflow refused records of run %s: %s (%d values are lost)", run_id, shown, len(reasons)
        )

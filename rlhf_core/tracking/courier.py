"""Delivers the records that the stages of a workspace leave in their journals, while they run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf_core.storage.files import LockFile
from rlhf_core.tracking.delivery import DELIVERY_LOCK, ServerAway, address, finish, send
from rlhf_core.tracking.journal import Journal, journals, waiting_records
from rlhf_core.tracking.retry_pauses import RetryPauses

logger = logging.getLogger(__name__)
DEFERRED_VARIABLE = "RLHF_TRACKING_DEFERRED"  # set for stages by the process that delivers their records


class Courier:
    """Sends records of running stages through one client, so that stages neither load MLflow nor wait for its server.

    It is entered for as long as stages run with ``RLHF_TRACKING_DEFERRED``. Meanwhile no other process delivers what
    earlier runs left. Journals of stages that deliver for themselves are left alone.
    """

    def __init__(
        self,
        client: Any,
        experiment_id: Callable[[], str],
        workspace: Path,
        uri: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client, self.experiment_id, self.workspace, self.server = client, experiment_id, workspace, address(uri)
        self.clock, self.pauses = clock, RetryPauses(clock)
        self.lock = LockFile(workspace / DELIVERY_LOCK)
        self.ended: set[Path] = set()  # journals whose last record has arrived

    def __enter__(self) -> Courier:
        self.lock.__enter__()
        self.lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.lock.__exit__(kind, error, traceback)

    def deliver_new(self) -> None:
        """Send what is new, and delete the journals of stages that have ended; nothing while the server rests."""
        if self.pauses.is_over:
            self._deliver(journals(self.workspace))

    def deliver_rest(self) -> None:
        """Send what is left once all stages have ended, those among them that were killed, too."""
        waiting = journals(self.workspace)
        self.ended |= {journal.folder for journal in waiting}
        self._deliver(waiting)
        if count := waiting_records(self.workspace):
            logger.warning("%d records wait for MLflow to answer again; the next run delivers them", count)

    def _deliver(self, waiting: list[Journal]) -> None:
        started = self.clock()
        try:
            for journal in waiting:
                if journal.header.deferred:
                    self._deliver_journal(journal)
        except ServerAway as error:
            logger.warning("MLflow at %s is away (%s): records of stages wait", self.server, error)
            self.pauses.failed(started)
        else:
            self.pauses.succeeded()

    def _deliver_journal(self, journal: Journal) -> None:
        if journal.header.run_id is None:
            journal.header = replace(journal.header, server=self.server)
        elif journal.header.server != self.server:
            return  # the server at another address made the run
        if any(record.kind == "end" for record in send(self.client, self.experiment_id, journal)):
            self.ended.add(journal.folder)
        if journal.folder in self.ended and journal.try_lock():
            try:
                finish(self.client, journal)
            finally:
                journal.release()

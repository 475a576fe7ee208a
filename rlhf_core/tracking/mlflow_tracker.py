"""One MLflow run whose records wait on disk while the server is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from rlhf_core.errors import ConfigError
from rlhf_core.tracking.delivery import ACCESS_DENIED, ServerAway, away_errors, deliver, make_run, requests_for
from rlhf_core.tracking.journal import Journal, JournalRecord
from rlhf_core.tracking.retry_pauses import RetryPauses
from rlhf_core.tracking.run_records import RunRecords

logger = logging.getLogger(__name__)


class MlflowTracker(RunRecords):
    """One MLflow run, written through a client so that no global state of MLflow is touched.

    A record that the server cannot take goes to the journal, and so do all after it, until an attempt to deliver them
    succeeds. Only a record that the server refuses is an error.
    """

    def __init__(
        self,
        client: Any,
        experiment_id: Callable[[], str],
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(journal)
        self.client, self.experiment_id, self.clock = client, experiment_id, clock
        self.pauses = RetryPauses(clock)

    def begin(self) -> bool:
        """Make the run on the server; False if that is away, so that records wait.

        Raises:
            ConfigError: The server does not accept the login.
        """
        started = self.clock()
        try:
            make_run(self.client, self.experiment_id, self.journal)
        except ServerAway as error:
            if error.status in ACCESS_DENIED:
                raise ConfigError(
                    f"MLflow at {self.journal.header.server} does not accept the login ({error}); set "
                    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or RLHF_TRACKING=off"
                ) from error
            self._announce(error, started)
            return False
        return True

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """End the run. What still waits is tried once more, and else left for the next command to deliver."""
        self.pauses.end()
        super().end(status)
        if not self.journal.is_empty:
            records, _ = self.journal.undelivered()
            logger.warning(
                "MLflow at %s is still away: %d records wait in %s; the next stage or `rlhf run` of this workspace "
                "delivers them",
                self.journal.header.server, len(records), self.journal.folder,
            )  # fmt: skip
            self.journal.release()

    def take(self, record: JournalRecord) -> None:
        """Send a record, or keep it in the journal."""
        run_id = self.journal.header.run_id
        if run_id is None or not self.journal.is_empty:
            self.journal.append(record)
            if self.pauses.is_over:
                self._deliver()
            return
        started = self.clock()
        try:
            for request in requests_for([record]):
                with away_errors():
                    request(self.client, run_id)
        except ServerAway as error:
            self._announce(error, started)
            self.journal.append(record)

    def _deliver(self) -> None:
        started = self.clock()
        try:
            delivered = deliver(self.client, self.experiment_id, self.journal)
        except ServerAway:
            self.pauses.failed(started)
            return
        server = self.journal.header.server
        logger.warning("MLflow at %s answers again; %d records were delivered", server, delivered)
        self.pauses.succeeded()

    def _announce(self, error: ServerAway, started: float) -> None:
        logger.warning(
            "MLflow at %s is away (%s): records are kept in %s and delivered when it answers; the stage goes on",
            self.journal.header.server, error, self.journal.folder,
        )  # fmt: skip
        self.pauses.failed(started)

"""One MLflow run whose records wait on disk while the server is away."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import ConfigError
from rlhf_core.tracking.delivery import ACCESS_DENIED, ServerAway, away_errors, deliver, make_run, requests_for
from rlhf_core.tracking.journal import Journal, JournalRecord

logger = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds between two attempts to reach the server
# A server that does not even refuse costs each attempt its timeout; no more than a fifth of the time goes there.
PAUSE_PER_ATTEMPT = 4.0


class MlflowTracker:
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
        self.client, self.experiment_id, self.journal, self.clock = client, experiment_id, journal, clock
        self.pause = FIRST_PAUSE
        self.next_attempt = 0.0

    @property
    def run_id(self) -> str:
        return self.journal.header.run_id or ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
        if finite:
            self._record("metrics", finite, step or 0)

    def log_params(self, params: Mapping[str, Any]) -> None:
        self._record("params", {name: str(value) for name, value in params.items()})

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self._record("artifact", {str(path): folder})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._record("tags", tags)

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
        self.next_attempt = 0.0
        self._record("end", {"status": status})
        if not self.journal.is_empty:
            logger.warning(
                "MLflow at %s is still away: %d records wait in %s; the next stage or `rlhf run` of this workspace "
                "delivers them",
                self.journal.header.server, len(self.journal.records()), self.journal.folder,
            )  # fmt: skip
            self.journal.release()

    def _record(
        self, kind: Literal["metrics", "params", "tags", "artifact", "end"], values: Mapping[str, Any], step: int = 0
    ) -> None:
        record = JournalRecord(kind, values, int(time.time() * 1000), step)
        run_id = self.journal.header.run_id
        if run_id is None or not self.journal.is_empty:
            self.journal.append(record)
            if self.clock() >= self.next_attempt:
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
            self._wait(started)
            return
        server = self.journal.header.server
        logger.warning("MLflow at %s answers again; %d records were delivered", server, delivered)
        self.pause = FIRST_PAUSE

    def _announce(self, error: ServerAway, started: float) -> None:
        logger.warning(
            "MLflow at %s is away (%s): records are kept in %s and delivered when it answers; the stage goes on",
            self.journal.header.server, error, self.journal.folder,
        )  # fmt: skip
        self._wait(started)

    def _wait(self, started: float) -> None:
        """Set the time of the next attempt, after one that began at ``started``."""
        now = self.clock()
        self.next_attempt = now + max(self.pause, PAUSE_PER_ATTEMPT * (now - started))
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

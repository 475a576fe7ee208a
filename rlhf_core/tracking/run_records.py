"""The tracker of a run: every call is a record in its journal, which somebody delivers while the run goes on."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import ConfigError
from rlhf_core.tracking.delivery import ACCESS_DENIED, ServerAway, finish, make_run, send
from rlhf_core.tracking.journal import Journal, JournalRecord
from rlhf_core.tracking.retry_pauses import RetryPauses

logger = logging.getLogger(__name__)
DELIVERY_SECONDS = 1.0


class JournalTracker:
    """Writes records into a journal, and delivers them once a second where it has a client to do so.

    Without a client the process that runs the stages delivers them, and MLflow is not even loaded here.
    """

    def __init__(
        self,
        journal: Journal,
        client: Any = None,
        experiment_id: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.journal, self.client, self.experiment_id, self.clock = journal, client, experiment_id, clock
        self.pauses = RetryPauses(clock)
        self._next_delivery = 0.0
        self._away = False

    @property
    def run_id(self) -> str:
        return self.journal.header.run_id or ""

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

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
        if finite:
            self._take(_record("metrics", finite, step or 0))

    def log_params(self, params: Mapping[str, Any]) -> None:
        self._take(_record("params", {name: str(value) for name, value in params.items()}))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self._take(_record("artifact", {str(path): folder}))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._take(_record("tags", tags))

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """End the run. What waits is tried once more, and else left for the next command to deliver."""
        self.journal.append(_record("end", {"status": status}))
        if self.client is not None and self._deliver():
            finish(self.client, self.journal)
            return
        if self.client is not None:
            records, _ = self.journal.undelivered()
            logger.warning(
                "MLflow at %s is still away: %d records wait in %s; the next stage or `rlhf run` of this workspace "
                "delivers them",
                self.journal.header.server, len(records), self.journal.folder,
            )  # fmt: skip
        self.journal.release()

    def _take(self, record: JournalRecord) -> None:
        self.journal.append(record)
        if self.client is not None and self.pauses.is_over and self.clock() >= self._next_delivery:
            self._deliver()

    def _deliver(self) -> bool:
        """Send what waits; whether the server took it."""
        started = self.clock()
        try:
            delivered = len(send(self.client, self.experiment_id, self.journal))
        except ServerAway as error:
            self._announce(error, started)
            return False
        if self._away:
            server = self.journal.header.server
            logger.warning("MLflow at %s answers again; %d records were delivered", server, delivered)
        self._away = False
        self.pauses.succeeded()
        self._next_delivery = self.clock() + DELIVERY_SECONDS
        return True

    def _announce(self, error: ServerAway, started: float) -> None:
        if not self._away:
            logger.warning(
                "MLflow at %s is away (%s): records are kept in %s and delivered when it answers; the stage goes on",
                self.journal.header.server, error, self.journal.folder,
            )  # fmt: skip
        self._away = True
        self.pauses.failed(started)


def _record(
    kind: Literal["metrics", "params", "tags", "artifact", "end"], values: Mapping[str, Any], step: int = 0
) -> JournalRecord:
    return JournalRecord(kind, values, int(time.time() * 1000), step)

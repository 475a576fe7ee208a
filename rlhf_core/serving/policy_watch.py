"""The policy that is served now, exchanged for another when its source says so. Requests are not interrupted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rlhf_core.errors import RlhfError
from rlhf_core.serving.loaded_policy import LoadedPolicy
from rlhf_core.serving.metrics import ServingMetrics
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision, PolicySource

Load = Callable[[PolicyRevision, PolicyFiles], LoadedPolicy]
# A revision that could not be loaded is tried again after so many seconds, another one at once.
RETRY_SECONDS = 60.0

logger = logging.getLogger(__name__)


class PolicyWatch:
    """Serves the revision that a source names, and keeps the one before while a new one cannot be loaded.

    A request takes ``policy`` once and answers with it to the end. A new policy is loaded beside the old one, whose
    memory is freed after its last request.

    Attributes:
        policy: What new requests are answered with.
        problem: Why the revision that should be served is not, in one line; empty if it is.
    """

    def __init__(
        self,
        source: PolicySource,
        metrics: ServingMetrics,
        load: Load = LoadedPolicy.load,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the first policy. Raises ``RlhfError`` where that fails."""
        self.source, self.metrics, self._load, self._clock = source, metrics, load, clock
        self.problem = ""
        self._failed: PolicyRevision | None = None
        self._retry_at = 0.0
        revision = source.latest()
        self._serve(load(revision, source.files(revision)))

    def check(self) -> None:
        """Ask the source once, and load what it names if that is not served yet."""
        try:
            latest = self.source.latest()
        except Exception as error:  # whatever a client of a registry raises, the server goes on with what it has
            self._report(f"cannot find out which revision to serve ({_one_line(error)})")
            return
        if latest == self.policy.revision:
            self._resolve()
        elif latest != self._failed or self._clock() >= self._retry_at:
            self._replace_by(latest)

    def run(self, stop: threading.Event, seconds: float) -> None:
        """Check every ``seconds`` until ``stop`` is set."""
        while not stop.wait(seconds):
            self.check()

    def _replace_by(self, revision: PolicyRevision) -> None:
        before = self.policy.revision
        try:
            policy = self._load(revision, self.source.files(revision))
        except Exception as error:  # damaged files and full memory end in many kinds of errors
            self._failed, self._retry_at = revision, self._clock() + RETRY_SECONDS
            self.metrics.reloads.labels("failed").inc()
            self._report(f"{revision.id} cannot be loaded ({_one_line(error)})")
            return
        self._serve(policy)
        self.metrics.reloads.labels("loaded").inc()
        self._resolve()
        logger.info("%s is served now; requests that %s had begun are finished by it", revision.id, before.id)

    def _serve(self, policy: LoadedPolicy) -> None:
        self.policy = policy
        self._failed = None
        self.metrics.serve_revision(policy.revision.id)

    def _report(self, problem: str) -> None:
        """Say once in the log, and in ``problem`` for as long as it holds, that the wanted revision is not served."""
        if problem != self.problem:
            logger.error("%s; %s is still served", problem, self.policy.revision.id)
        self.problem = problem
        self.metrics.reload_failing.set(1)

    def _resolve(self) -> None:
        self.problem, self._failed = "", None
        self.metrics.reload_failing.set(0)


def _one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return message if isinstance(error, RlhfError) else f"{type(error).__name__}: {message}"[:300]

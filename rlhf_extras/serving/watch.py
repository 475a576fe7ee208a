"""The served policy over time: changed for a newer one, and kept while that cannot be loaded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_core.errors import ModelError, named_line
from rlhf_core.serving.policy import LoadedPolicy
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_extras.serving.metrics import ServingMetrics
from rlhf_extras.serving.sources import PolicySource

Load = Callable[[PolicyRevision, PolicyFiles], LoadedPolicy]
# A revision that could not be loaded is tried again after so many seconds, another one at once.
RETRY_SECONDS = 60.0

logger = logging.getLogger(__name__)

FileStamps = tuple[tuple[str, int, int, int, int], ...]


def file_stamps(folder: Path) -> FileStamps:
    """Return what a write changes of a file, for all files in ``folder``.

    That is name, inode, size and times. Nobody can set the time of the inode's change back. Empty
    where files vanish meanwhile.
    """
    stamps = []
    try:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name, stat = path.relative_to(folder).as_posix(), path.stat()
                times = stat.st_mtime_ns, stat.st_ctime_ns
                stamps.append((name, stat.st_ino, stat.st_size, *times))
    except OSError:
        return ()
    return tuple(stamps)


class PolicyWatch:
    """Serves the revision that a source names, and keeps the one before while a new one cannot be
    loaded.

    A request takes ``policy`` once and answers with it to the end. A new policy is loaded beside
    the old one, whose memory is freed after its last request.

    Attributes:
        policy: What new requests are answered with.
        trouble: That something is wrong, as anybody may know it; empty if nothing is.
        problem: The same with its reason, in one line.
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
        self.problem = self.trouble = ""
        self._failed: PolicyRevision | None = None
        self._retry_at = 0.0
        self._serve(*self._verified(source.latest()))

    def check(self) -> None:
        """Ask the source once, and load what it names if that is not served yet."""
        try:
            latest = self.source.latest()
        except (
            Exception
        ) as error:  # whatever a client of a registry raises, the server goes on with what it has
            self._report("cannot find out which revision to serve", error)
            return
        if latest != self.policy.revision:
            if latest != self._failed or self._clock() >= self._retry_at:
                self._replace_by(latest)
        elif self._stamps != file_stamps(self._folder):
            changed = ModelError(
                f"{self._folder}; replies are those of the files as they were when they were loaded"
            )
            self._report(f"files of {latest.id} have changed since they were loaded", changed)
        else:
            self._resolve()

    def run(self, stop: threading.Event, seconds: float) -> None:
        """Check every ``seconds`` until ``stop`` is set."""
        while not stop.wait(seconds):
            self.check()

    def _verified(self, revision: PolicyRevision) -> tuple[LoadedPolicy, Path, FileStamps]:
        """Load ``revision`` from files that nobody has written to since before they were verified.

        Raises:
            ModelError: Somebody has.
        """
        files = self.source.files(revision)
        stamps = file_stamps(files.folder)
        if stamps:
            files = self.source.files(revision)  # verified after the stamps were taken
        policy = self._load(revision, files)
        if file_stamps(files.folder) != stamps:
            raise ModelError(
                f"files in {files.folder} were changed while they were loaded; load them again at rest"
            )
        return policy, files.folder, stamps

    def _replace_by(self, revision: PolicyRevision) -> None:
        before = self.policy.revision
        try:
            loaded = self._verified(revision)
        except Exception as error:  # damaged files and full memory end in many kinds of errors
            self._failed, self._retry_at = revision, self._clock() + RETRY_SECONDS
            self.metrics.reloads.labels("failed").inc()
            self._report(f"{revision.id} cannot be loaded", error)
            return
        self._serve(*loaded)
        self.metrics.reloads.labels("loaded").inc()
        self._resolve()
        logger.info(
            "%s is served now; requests that %s had begun are finished by it",
            revision.id,
            before.id,
        )

    def _serve(self, policy: LoadedPolicy, folder: Path, stamps: FileStamps) -> None:
        self.policy, self._folder, self._stamps = policy, folder, stamps
        self._failed = None
        self.metrics.serve_revision(policy.revision.id)

    def _report(self, trouble: str, error: Exception) -> None:
        """Say once in the log, and in ``problem`` for as long as it lasts, what is wrong with what
        is served.
        """
        problem = f"{trouble} ({named_line(error)})"
        if problem != self.problem:
            logger.error("%s; %s is still served", problem, self.policy.revision.id)
        self.problem, self.trouble = problem, trouble
        self.metrics.reload_failing.set(1)

    def _resolve(self) -> None:
        self.problem, self.trouble, self._failed = "", "", None
        self.metrics.reload_failing.set(0)

"""How long to leave a server alone that did not answer."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds between two attempts to reach the server
# A server that does not even refuse costs each attempt its timeout; no more than a fifth of the time goes there.
PAUSE_PER_ATTEMPT = 4.0


class RetryPauses:
    """Tells when the next attempt to reach a server is due: after pauses that double while attempts fail."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._pause, self._next_attempt = FIRST_PAUSE, 0.0

    @property
    def is_over(self) -> bool:
        """Whether an attempt is due."""
        return self.clock() >= self._next_attempt

    def end(self) -> None:
        """Make an attempt due now."""
        self._next_attempt = 0.0

    def failed(self, started: float) -> None:
        """Begin a pause after an attempt that began at ``started``, by the clock."""
        now = self.clock()
        self._next_attempt = now + max(self._pause, PAUSE_PER_ATTEMPT * (now - started))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def succeeded(self) -> None:
        """Let the next pause be a short one."""
        self._pause = FIRST_PAUSE

"""Restarting the embedded Prefect server while the command that started it runs."""

from __future__ import annotations

from collections.abc import Callable

from flows.prefect_server.services import SERVER, Services, restart_server
from flows.supervision.signals import STOP, WallClock
from rlhf_core.errors import RlhfError

SERVER_RESTARTS = 3


class ServerWatchdog:
    """Restarts the embedded server of ``services`` if it died or the clock was set back; leaves external servers alone.

    Prefect's server schedules its own work (schedules, late runs, automations) by the wall clock: set back by hours, it
    does none of that for as long, and was once seen to stop responding altogether. ``report`` is given a line for each
    restart.
    """

    def __init__(self, services: Services, report: Callable[[str], None]) -> None:
        self.services, self.report = services, report
        self.clock = WallClock()
        self.restarts = 0

    def check(self) -> str | None:
        """Restart the server if it needs it; return the problem if that was in vain or happened too often."""
        if not self.services.embedded or (reason := self._reason_to_restart()) is None:
            return None
        if self.restarts >= SERVER_RESTARTS:
            return f"{reason}, for the {SERVER_RESTARTS + 1}th time; see .rlhf/logs/{SERVER}.log"
        self.restarts += 1
        self.report(f"{reason}; restarting it")
        try:
            restart_server(self.services, STOP.is_set)
        except RlhfError as error:
            return str(error)
        return None

    def _reason_to_restart(self) -> str | None:
        status = self.services.running[SERVER].poll()
        if status is not None:
            return f"the Prefect server exited (status {status})"
        seconds = self.clock.seconds_set_back()
        return f"the clock was set back by {seconds:.0f} s, which stalls the Prefect server" if seconds else None

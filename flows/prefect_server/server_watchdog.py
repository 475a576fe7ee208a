"""The embedded server, kept going for as long as the command that started it lives."""

from __future__ import annotations

from collections.abc import Callable

from flows.prefect_server.services import SERVER, Services, restart_server
from flows.supervision.clock import WallClock
from flows.supervision.signals import STOP
from rlhf_core.errors import RlhfError

SERVER_RESTARTS = 3


class ServerWatchdog:
    """Starts the embedded server of ``services`` again when it has ended, and when the clock was set back.

    Prefect's server plans its own work (schedules, late runs, automations) by the wall clock: set back by hours it does
    none of that for as long, and was once seen to stand still altogether. ``tell`` is given a line for each restart.
    """

    def __init__(self, services: Services, tell: Callable[[str], None]) -> None:
        self.services, self.tell = services, tell
        self.clock = WallClock()
        self.restarts = 0

    def look(self) -> str | None:
        """Do what is needed now; a problem that ends the command, if there is one. Somebody else's server is theirs."""
        if not self.services.embedded or (reason := self._reason()) is None:
            return None
        if self.restarts >= SERVER_RESTARTS:
            return f"{reason}, for the {SERVER_RESTARTS + 1}th time; see .rlhf/logs/{SERVER}.log"
        self.restarts += 1
        self.tell(f"{reason}; starting it again")
        try:
            restart_server(self.services, STOP.is_set)
        except RlhfError as error:
            return str(error)
        return None

    def _reason(self) -> str | None:
        status = self.services.running[SERVER].poll()
        if status is not None:
            return f"the Prefect server ended (status {status})"
        back = self.clock.set_back()
        return f"the clock was set back by {back:.0f} s; the Prefect server would wait that long" if back else None

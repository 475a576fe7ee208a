"""The log of a stage on another host: sent there to the Prefect server piece by piece, written here into the same file.

Prefect's own log handler drops what it cannot send. Here what has not arrived is sent again, so that a server that was
out of reach for a while costs no line.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
from prefect.client.schemas.objects import Log
from prefect.client.schemas.sorting import LogSort
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.types import DateTime

LOGGER = "rlhf.stage"
INFO = 20
EVERY_SECONDS = 2.0
PIECE_BYTES = 200_000
PAGE = 200


class LogShipper:
    """Sends what is added to ``log`` while the block lasts, as log records of a flow run; whole lines only."""

    def __init__(self, log: Path, flow_run: UUID, patience: float = 60.0) -> None:
        self.log, self.flow_run, self.patience = log, flow_run, patience
        self.offset = log.stat().st_size if log.exists() else 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="log-shipper", daemon=True)

    def __enter__(self) -> LogShipper:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """What is left is sent for at most ``patience`` seconds."""
        self.ended.set()
        self.thread.join(self.patience)

    def _run(self) -> None:
        give_up = float("inf")
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            while time.monotonic() < give_up:
                last = self.ended.wait(EVERY_SECONDS)
                if last:
                    give_up = min(give_up, time.monotonic() + self.patience)
                if self._send(client, last) and last:
                    return
                if last:
                    time.sleep(EVERY_SECONDS)

    def _send(self, client: SyncPrefectClient, last: bool) -> bool:
        """Whether all that there was has been sent."""
        while piece := self._piece(last):
            text = piece.decode("utf-8", errors="replace")
            record = LogCreate(name=LOGGER, level=INFO, message=text, timestamp=_now(), flow_run_id=self.flow_run)
            try:
                client.create_logs([record])
            except Exception:  # whatever it was, the same piece is sent again
                return False
            self.offset += len(piece)
        return True

    def _piece(self, last: bool) -> bytes:
        if not self.log.exists():
            return b""
        with self.log.open("rb") as stream:
            stream.seek(self.offset)
            piece = stream.read(PIECE_BYTES)
        return piece if last or len(piece) == PIECE_BYTES else piece[: piece.rfind(b"\n") + 1]


class LogFollower:
    """Appends to ``log`` what a :class:`LogShipper` sends."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.seen: set[UUID] = set()
        self.last: DateTime | None = None
        self.next_look = 0.0

    def look(self, client: SyncPrefectClient, flow_run: UUID, now: bool = False) -> None:
        """Fetch what is new, at most every two seconds unless ``now``."""
        if not now and time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + EVERY_SECONDS
        fresh = [log for log in self._records(client, flow_run) if log.name == LOGGER and log.id not in self.seen]
        if fresh:
            with self.log.open("a", encoding="utf-8") as stream:
                stream.writelines(log.message for log in fresh)
            self.last = fresh[-1].timestamp
            self.seen = {log.id for log in fresh} | self.seen

    def _records(self, client: SyncPrefectClient, flow_run: UUID) -> list[Log]:
        since = LogFilterTimestamp(after_=self.last) if self.last else None
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]), timestamp=since)
        found: list[Log] = []
        while True:
            page = client.read_logs(wanted, limit=PAGE, offset=len(found), sort=LogSort.TIMESTAMP_ASC)
            found += page
            if len(page) < PAGE:
                return found


def _now() -> DateTime:
    return cast(DateTime, datetime.now(UTC))

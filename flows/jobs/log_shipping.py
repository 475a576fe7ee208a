"""The log of a stage on another host, sent through the Prefect server into the log file on this one.

Prefect's own log handler drops what it cannot send. Here every chunk is sent until the server has accepted it, so that
no line is lost while the server is out of reach.
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
INTERVAL_SECONDS = 2.0
CHUNK_BYTES = 200_000
PAGE = 200


class LogShipper:
    """Context manager that sends whatever is appended to ``log`` as log records of a flow run, in whole lines.

    At the end of the block it tries for at most ``flush_seconds`` to send the rest.
    """

    def __init__(self, log: Path, flow_run: UUID, flush_seconds: float = 60.0) -> None:
        self.log, self.flow_run, self.flush_seconds = log, flow_run, flush_seconds
        self.offset = log.stat().st_size if log.exists() else 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="log-shipper", daemon=True)

    def __enter__(self) -> LogShipper:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(self.flush_seconds)

    def _run(self) -> None:
        deadline = float("inf")
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            while time.monotonic() < deadline:
                flush = self.ended.wait(INTERVAL_SECONDS)
                if flush:
                    deadline = min(deadline, time.monotonic() + self.flush_seconds)
                if self._send(client, flush) and flush:
                    return
                if flush:
                    time.sleep(INTERVAL_SECONDS)

    def _send(self, client: SyncPrefectClient, flush: bool) -> bool:
        """Send what is there; return whether all of it was accepted."""
        while chunk := self._next_chunk(flush):
            now = cast(DateTime, datetime.now(UTC))
            text = chunk.decode("utf-8", errors="replace")
            record = LogCreate(name=LOGGER, level=INFO, message=text, timestamp=now, flow_run_id=self.flow_run)
            try:
                client.create_logs([record])
            except Exception:  # whatever the reason, the same chunk is sent again
                return False
            self.offset += len(chunk)
        return True

    def _next_chunk(self, flush: bool) -> bytes:
        if not self.log.exists():
            return b""
        with self.log.open("rb") as stream:
            stream.seek(self.offset)
            chunk = stream.read(CHUNK_BYTES)
        return chunk if flush or len(chunk) == CHUNK_BYTES else chunk[: chunk.rfind(b"\n") + 1]


class LogFollower:
    """Appends to ``log`` what a :class:`LogShipper` has sent to the server."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.seen: set[UUID] = set()
        self.last: DateTime | None = None
        self.next_fetch = 0.0

    def fetch(self, client: SyncPrefectClient, flow_run: UUID, now: bool = False) -> None:
        """Append the records that are new on the server; asks it every two seconds at most unless ``now``."""
        if not now and time.monotonic() < self.next_fetch:
            return
        self.next_fetch = time.monotonic() + INTERVAL_SECONDS
        records = self._read_records(client, flow_run)
        new = [record for record in records if record.name == LOGGER and record.id not in self.seen]
        if new:
            with self.log.open("a", encoding="utf-8") as stream:
                stream.writelines(record.message for record in new)
            self.last = new[-1].timestamp
            self.seen = {record.id for record in new} | self.seen

    def _read_records(self, client: SyncPrefectClient, flow_run: UUID) -> list[Log]:
        since = LogFilterTimestamp(after_=self.last) if self.last else None
        of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]), timestamp=since)
        records: list[Log] = []
        while True:
            page = client.read_logs(of_run, limit=PAGE, offset=len(records), sort=LogSort.TIMESTAMP_ASC)
            records += page
            if len(page) < PAGE:
                return records

"""What passes between a workspace and another host: files by DVC's own commands, the log through
the Prefect server.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
from prefect.client.schemas.objects import Log
from prefect.client.schemas.sorting import LogSort
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.types import DateTime

from flows.dvc_repo.root import dvc_settings
from flows.stage import StageOutcome, StageSpec, run_stage
from flows.supervision.processes import LogReader, child_environment, dvc_errors, start_supervised
from flows.supervision.signals import STOP, retry
from flows.workspace import private_path
from rlhf_core.errors import RlhfError
from rlhf_core.storage.data_files import carries_credentials

# Options of a remote that another host needs and that are no secret; the others are set on each
# host.
PUBLIC_OPTIONS = (
    "url",
    "endpointurl",
    "region",
    "port",
    "user",
    "use_ssl",
    "account_name",
    "projectname",
)
NO_SHELL = {"SHELL": shutil.which("false") or "/bin/false"}


class TransferFailed(RlhfError):
    """A transfer failed, and another attempt may succeed."""

    exit_code = 1


def dvc_transfer(
    workspace: Path,
    arguments: tuple[str, ...],
    seconds: float = 0,
    report: Callable[[str], None] = print,
) -> None:
    """Run ``dvc ARGUMENTS``, which move data, again for ``seconds`` while the remote is out of
    reach.

    The output goes to ``.rlhf/logs/transfer.log``; ``report`` is given each failure that is
    followed by an attempt.

    Raises:
        TransferFailed: with DVC's first error, which names the file and the remote's own message.
        KeyboardInterrupt: the stop flag was raised.
    """
    log = private_path(workspace, "logs", "transfer.log")
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]

    def attempt() -> None:
        environment = child_environment(workspace)
        result = start_supervised(
            command, name=arguments[0], cwd=workspace, env=environment, log=log
        ).result()
        if STOP.is_set():
            raise KeyboardInterrupt
        if result.exit_code:
            errors = dvc_errors(result.stdout)
            raise TransferFailed(
                errors[0] if errors else f"dvc exited with status {result.exit_code}; see {log}"
            )

    retry(
        attempt,
        seconds,
        is_transient=lambda error: isinstance(error, TransferFailed),
        report=report,
    )


def restore_result(spec: StageSpec) -> StageOutcome | None:
    """Take the stage's result from the run cache, here or in the default remote; None where it is
    in neither.

    Nothing is computed. As before every run of a stage, DVC removes the outputs of an earlier
    result first.
    """
    environment = {**spec.environment, **NO_SHELL}
    outcome = run_stage(
        StageSpec(spec.workspace, spec.name, spec.outputs, environment, spec.grace, pull=True)
    )
    return outcome if outcome.ok or outcome.action == "stopped" else None


def describe_remote(workspace: Path, name: str | None) -> dict[str, str]:
    """Return name and public options of a DVC remote, by default of the default one.

    Raises:
        RlhfError: it is missing or of a kind that cannot serve two hosts.
    """
    settings = dvc_settings(workspace)
    name = name or settings.get("core.remote")
    if name is None:
        raise RlhfError("no DVC remote is set; make one with `dvc remote add -d NAME URL`")
    prefix = f"remote.{name}."
    options = {
        key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)
    }
    if "url" not in options:
        raise RlhfError(f"there is no DVC remote {name}; make it with `dvc remote add {name} URL`")
    url = urlsplit(options["url"])
    if url.password or carries_credentials(options["url"]):
        raise RlhfError(
            f"the URL of the DVC remote {name} holds a password or token, which the server would show; put it into "
            f"`dvc remote modify --local {name} password …` on each host"
        )
    versioned = {options.get(key, "").lower() for key in ("worktree", "version_aware")} & {
        "1",
        "true",
        "yes",
        "on",
    }
    if url.scheme in ("http", "https") or versioned:
        raise RlhfError(
            f"the DVC remote {name} ({options['url']}) keeps no run cache; use a folder, ssh or a bucket"
        )
    return {"name": name, **{key: options[key] for key in PUBLIC_OPTIONS if key in options}}


LOGGER = "rlhf.stage"
INFO = 20
INTERVAL_SECONDS, FLUSH_SECONDS = 2.0, 60.0
CHUNK_BYTES = 200_000
PAGE = 200


class LogShipper:
    """Context manager that sends whatever is appended to ``log`` as log records of a flow run, in
    whole lines.

    At the end of the block it tries for at most a minute to send the rest. Prefect's own log
    handler forgets what the server does not take, such as while it is restarted.
    """

    def __init__(self, log: Path, flow_run: UUID) -> None:
        self.reader, self.flow_run = LogReader(log), flow_run
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="log-shipper", daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(FLUSH_SECONDS)

    def _run(self) -> None:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True) as client,
        ):
            while not self.ended.wait(INTERVAL_SECONDS):
                self._send(client)
            deadline = time.monotonic() + FLUSH_SECONDS
            while not self._send(client, unfinished=True) and time.monotonic() < deadline:
                time.sleep(INTERVAL_SECONDS)

    def _send(self, client: SyncPrefectClient, unfinished: bool = False) -> bool:
        """Send what is there; return whether all of it was accepted."""
        while chunk := self.reader.lines(CHUNK_BYTES, unfinished):
            now = cast(DateTime, datetime.now(UTC))
            text = chunk.decode("utf-8", errors="replace")
            record = LogCreate(
                name=LOGGER, level=INFO, message=text, timestamp=now, flow_run_id=self.flow_run
            )
            try:
                client.create_logs([record])
            except Exception:  # whatever the reason, the same chunk is sent again
                return False
            self.reader.start += len(chunk)
        return True


class LogFollower:
    """Appends to ``log`` what a :class:`LogShipper` has sent to the server."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.seen: set[UUID] = set()
        self.last: DateTime | None = None
        self.next_fetch = 0.0

    def fetch(self, client: SyncPrefectClient, flow_run: UUID, now: bool = False) -> None:
        """Append the records that are new on the server; asks it every two seconds at most unless
        ``now``.
        """
        if not now and time.monotonic() < self.next_fetch:
            return
        self.next_fetch = time.monotonic() + INTERVAL_SECONDS
        since = LogFilterTimestamp(after_=self.last) if self.last else None
        of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]), timestamp=since)
        records: list[Log] = []
        page = None
        while page is None or len(page) == PAGE:
            page = client.read_logs(
                of_run, limit=PAGE, offset=len(records), sort=LogSort.TIMESTAMP_ASC
            )
            records += page
        new = [record for record in records if record.name == LOGGER and record.id not in self.seen]
        if new:
            with self.log.open("a", encoding="utf-8") as stream:
                stream.writelines(record.message for record in new)
            self.last = new[-1].timestamp
            self.seen |= {record.id for record in new}

"""Records of a run on disk, while they wait for the server or for the process that delivers them.

A journal is a folder ``.rlhf/tracking/ID`` with ``run.json`` (whose records they are),
``records.jsonl`` (one a line, in order), ``delivered`` (how many bytes of those have arrived) and
``files/`` (copies of artifacts, which the stage may overwrite). Delivering a record twice changes
nothing in MLflow. A journal is deleted as a whole.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import LockFile, atomic_write_json, atomic_write_text, read_json

logger = logging.getLogger(__name__)
FOLDER = Path(".rlhf") / "tracking"
JOURNAL_TAG = "rlhf.journal"
HEADER, RECORDS, DELIVERED, FILES, LOCK = "run.json", "records.jsonl", "delivered", "files", "lock"


class RecordedTime:
    """The time of records, which stands still while the clock of this host is set back.

    MLflow orders values by it, and a run cannot end before it began.
    """

    def __init__(self) -> None:
        self.latest = 0

    def now(self) -> int:
        """Milliseconds since 1970."""
        self.latest = max(self.latest, int(time.time() * 1000))
        return self.latest


RECORDED = RecordedTime()


@dataclass(frozen=True)
class JournalRecord:
    """One thing to tell the server about a run.

    Attributes:
        kind: What ``values`` are: metrics, params or tags by name, datasets as
            :func:`.dataset_input` takes them, the folder of an artifact by its file, or the final
            status of the run by "status".
        step: The step of metrics.
        time: When it happened, in milliseconds since 1970.
    """

    kind: Literal["metrics", "params", "tags", "datasets", "artifact", "end"]
    values: Mapping[str, Any]
    step: int = 0
    time: int = field(default_factory=lambda: RECORDED.now())


@dataclass(frozen=True)
class RunHeader:
    """The run that records belong to.

    Attributes:
        server: Address of the server, without name and password.
        run_id: None as long as the server has not been there to make the run.
        experiment: Name of its experiment.
        started: When it began, in milliseconds since 1970.
        deferred: Whether another process delivers the records while the stage runs.
    """

    server: str
    run_id: str | None
    experiment: str
    tags: Mapping[str, str]
    started: int
    deferred: bool = False


class Journal:
    """The records of one run that wait. The folder and its lock exist as long as there are any."""

    def __init__(self, folder: Path, header: RunHeader) -> None:
        self.folder, self.header = folder, header
        self.lock: LockFile | None = None

    @classmethod
    def new(cls, workspace: Path, header: RunHeader) -> Journal:
        """An empty journal of ``workspace``, whose name becomes a tag of the run."""
        name = uuid4().hex
        return cls(
            workspace / FOLDER / name, replace(header, tags={**header.tags, JOURNAL_TAG: name})
        )

    @property
    def is_on_disk(self) -> bool:
        """Whether there is a folder that another process may have found."""
        return (self.folder / HEADER).is_file()

    def append(self, record: JournalRecord) -> None:
        """Write ``record`` behind the others; the file of an artifact is copied."""
        if self.lock is None or not self.is_on_disk:  # removing it must not end a training
            self.release()  # of a folder that was removed, or in which there was no room for the header
            self.lock = LockFile(self.folder / LOCK).__enter__()
            self.lock.acquire()
            atomic_write_json(self.folder / HEADER, asdict(self.header))
        if record.kind == "artifact":
            record = replace(
                record,
                values={self._keep(Path(file)): folder for file, folder in record.values.items()},
            )
        line = json.dumps(asdict(record)).encode() + b"\n"
        with (self.folder / RECORDS).open("ab", buffering=0) as stream:
            position = stream.tell()
            if stream.write(line) != len(line):
                stream.truncate(position)  # the next record must not begin in the middle of a line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))

    def undelivered(self) -> tuple[list[JournalRecord], int]:
        """Records that have not arrived, in order, and the position in bytes behind them.

        An unfinished last line, which a killed process leaves, is no record. A damaged line is none
        either.
        """
        delivered = delivered_bytes(self.folder)
        waiting = _bytes_from(self.folder / RECORDS, delivered)
        complete = waiting[: waiting.rfind(b"\n") + 1]
        records = [
            record
            for line in complete.split(b"\n")[:-1]
            if (record := _record_of(line)) is not None
        ]
        for number, record in enumerate(records):
            if record.kind == "artifact":
                files = {str(self.folder / file): folder for file, folder in record.values.items()}
                records[number] = replace(record, values=files)
        return records, delivered + len(complete)

    def end_status(self) -> str | None:
        """How the stage ended, as it recorded; one that was killed has not."""
        lines = _bytes_from(self.folder / RECORDS, 0).split(b"\n")[:-1]
        last = _record_of(lines[-1]) if lines else None
        return str(last.values["status"]) if last is not None and last.kind == "end" else None

    def mark_delivered(self, position: int) -> None:
        """Note that all records up to ``position``, in bytes, have arrived."""
        atomic_write_text(self.folder / DELIVERED, str(position))

    def assign_run(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Note that the server has made the run, with ``tags``."""
        self.header = replace(self.header, run_id=run_id, tags=tags)
        if self.is_on_disk:
            atomic_write_json(self.folder / HEADER, asdict(self.header))

    def try_lock(self) -> bool:
        """Take the lock of an existing journal unless another process has it; return whether."""
        lock = LockFile(self.folder / LOCK).__enter__()
        if not lock.try_acquire() or not self.is_on_disk:  # or it was delivered meanwhile
            lock.__exit__(None, None, None)
            return False
        self.lock = lock
        return True

    def delete(self) -> None:
        """Delete all records, once they have arrived."""
        (self.folder / HEADER).unlink(
            missing_ok=True
        )  # first: what a killed process leaves is no journal any more
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave the records to whoever delivers them later."""
        if self.lock is not None:
            self.lock.__exit__(None, None, None)
            self.lock = None

    def _keep(self, file: Path) -> str:
        """Copy a file, which the stage may overwrite, into the journal; return the copy's path."""
        copy = self.folder / FILES / uuid4().hex / file.name
        copy.parent.mkdir(parents=True)
        shutil.copy2(file, copy)
        return str(copy.relative_to(self.folder))


def journals(workspace: Path) -> list[Journal]:
    """All journals of ``workspace``, oldest first, without their locks."""
    headers = [
        (header.stat().st_mtime, header) for header in (workspace / FOLDER).glob(f"*/{HEADER}")
    ]
    readable = []
    for _, header in sorted(headers):
        try:
            readable.append(Journal(header.parent, RunHeader(**read_json(header))))
        except (RlhfError, TypeError) as error:
            logger.warning("%s is damaged (%s); its records are not delivered", header, error)
    return readable


def waiting_journals(workspace: Path) -> Iterator[Journal]:
    """Yield journals of runs that have ended, oldest first, each locked meanwhile."""
    for journal in journals(workspace):
        if journal.try_lock():
            try:
                yield journal
            finally:
                journal.release()


def waiting_records(workspace: Path) -> int:
    """How many records of ``workspace`` have not reached their server."""
    headers = (workspace / FOLDER).glob(f"*/{HEADER}")
    return sum(
        _bytes_from(one.parent / RECORDS, delivered_bytes(one.parent)).count(b"\n")
        for one in headers
    )


def delivered_bytes(folder: Path) -> int:
    """Return how much of a journal's records has arrived; 0 where that is unreadable."""
    try:
        position = int((folder / DELIVERED).read_text(encoding="utf-8"))
        return position if 0 <= position <= (folder / RECORDS).stat().st_size else 0
    except (OSError, ValueError):
        return 0


def _record_of(line: bytes) -> JournalRecord | None:
    try:
        return JournalRecord(**json.loads(line))
    except (ValueError, TypeError):
        logger.warning("a damaged record was left out: %s", line[:80])
        return None


def _bytes_from(path: Path, position: int) -> bytes:
    """Return the content of a file behind ``position``; nothing where there is no file."""
    try:
        with path.open("rb") as stream:
            stream.seek(position)
            return stream.read()
    except FileNotFoundError:
        return b""

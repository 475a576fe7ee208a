"""The checkpoints of one run, written while it trains.

They are so complete that it resumes as if it had never stopped.

:meth:`CheckpointManager.save` copies what it is given to host memory and returns. What there is no
room for it writes before it returns. Then, in a thread, each rank writes its copies and hashes its
files; when all ranks have, rank 0 writes the manifest, gives the folder its name, and deletes
checkpoints that are no longer kept. A process killed at any moment leaves the earlier checkpoints
as they were.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError

from rlhf_core.errors import NO_ROOM_WORDS, CheckpointError, RlhfError
from rlhf_core.runtime import distributed
from rlhf_core.runtime.machine import forget_peak
from rlhf_core.storage.files import REMOVED, fsync_path, sha256_file
from rlhf_core.training.checkpoints import checkpoint
from rlhf_core.training.checkpoints.checkpoint import (
    BUILDING,
    MANIFEST,
    META,
    BackgroundWriter,
    Checkpoint,
    HostCopies,
    Piece,
    bytes_of,
    write_pieces,
)
from rlhf_core.training.checkpoints.store import CheckpointStore
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.history import History
from rlhf_core.training.rng import rng_state, set_rng_state

logger = logging.getLogger(__name__)

INTERRUPT_SECONDS = (
    30.0  # how long an interrupted run waits for the checkpoint that is being written
)


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        pieces: Copies of this rank's, in host memory.
        meta: As JSON text.
        keep: As many states stay in the store.
        lines: Files that must be on the disk before the checkpoint is, since it relies on them.
        later: Steps whose checkpoints are deleted before this one counts: they are of an abandoned
            run.
        outdated: Steps whose checkpoints are deleted after it.
        attached: Must have succeeded before the checkpoint counts.
        files: What this rank has written of it.
        error: Why one of them could not be written.
        result: Done when the checkpoint is on the disk.
    """

    step: int
    pieces: dict[str, Piece]
    meta: str
    keep: int
    lines: Sequence[Path]
    later: list[int]
    outdated: list[int]
    attached: Future[None] | None = None
    files: list[Path] = field(default_factory=list)
    error: Exception | None = None
    result: Future[None] = field(default_factory=Future)


class CheckpointManager:
    """Writes and reads the checkpoints in one folder, which all ranks share: that of rank 0.

    As a context manager it ends when the last checkpoint is on the disk, and raises what went wrong
    with it.
    """

    def __init__(self, directory: Path, store: CheckpointStore | None = None) -> None:
        """Open the folder; every rank must call it.

        Args:
            directory: Folder of the run's checkpoints. That of rank 0 counts.
            store: Receives a copy of the whole partial state, the parent of ``directory``, after
                every checkpoint.

        Raises:
            CheckpointError: The folder cannot be made, or a rank does not see it.
        """
        own = str(directory.absolute())
        self.directory = Path(distributed.broadcast_from_rank0(own))
        self.store = store
        self._prepare()
        self.writer = BackgroundWriter()
        self._copies = HostCopies()
        self._group: Any = None
        self._pending: PendingCheckpoint | None = None
        self._attached: Future[None] | None = None
        self._has_warned = False

    def _prepare(self) -> None:
        if distributed.is_rank_zero():
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"the folder of checkpoints {self.directory} cannot be made: {error.strerror}; make its parent "
                    "writable"
                ) from error
            for left in (
                *self.directory.glob(f"{BUILDING}*"),
                *self.directory.glob(f".*{REMOVED}"),
            ):
                shutil.rmtree(left, ignore_errors=True)
        distributed.any_rank(False)  # rank 0 has made the folder
        seen = distributed.every_rank(self.directory.is_dir())
        if not all(seen):
            raise CheckpointError(
                f"rank {seen.index(False)} does not see the folder of checkpoints {self.directory}, where every rank "
                "writes its part: put the workspace into a folder that all machines share under the same path"
            )

    def save(
        self,
        step: int,
        pieces: Mapping[str, Piece],
        meta: Mapping[str, Any],
        keep: int,
        keep_from: int | None = None,
        spare: Collection[int] = (),
        lines: Sequence[Path] = (),
    ) -> None:
        """Copy the state after ``step`` steps, and have it written while training goes on.

        Every rank must call it.

        It waits for the checkpoint before, and until pieces are written that host memory has no
        room for a copy of. Checkpoints of the same or a later step are deleted: they are of an
        abandoned run, from before which this one resumed.

        Args:
            pieces: This rank's pieces of the state's tensors.
            meta: JSON with finite numbers; that of rank 0 is written.
            keep: The newest checkpoints that stay.
            keep_from: All checkpoints from this step on stay.
            spare: Steps whose checkpoints are deleted in any case.
            lines: Files of this rank that must be on the disk before the checkpoint counts.

        Raises:
            CheckpointError: The one before could not be written.
        """
        self.finish()
        if self._group is None:
            self._group = distributed.background_group()
        saved = checkpoint.saved_steps(self.directory) if distributed.is_rank_zero() else []
        earlier = [number for number in saved if number < step]
        candidates = [*(number for number in earlier if number not in spare), step]
        outdated = [
            number for number in candidates[:-keep] if keep_from is None or number < keep_from
        ]
        copies, uncopied = self._copies.copy(pieces)
        later = [number for number in saved if number >= step]
        spared = [number for number in earlier if number in spare]
        content = json.dumps({"step": step, "meta": meta}, allow_nan=False)
        pending = PendingCheckpoint(
            step, copies, content, keep, lines, later, outdated + spared, self._attached
        )
        if uncopied:
            self._write_uncopied(pending, uncopied)
        pending.result = self.writer.submit(lambda: self._write(pending))
        # Only now: whoever is interrupted waits for what is pending.
        self._pending, self._attached = pending, None

    def attach(self, job: Callable[[], None]) -> None:
        """Run ``job`` in the background: it writes files that the next checkpoint relies on.

        It waits for the one before. If a job fails, so does the next checkpoint. It is not run if
        the checkpoint before it could not be written: what it deletes may be needed by an older
        one.
        """
        if self._attached is not None:
            wait([self._attached])
            self._attached.result()
        before = self._pending

        def run() -> None:
            if before is None or before.result.exception() is None:
                job()

        self._attached = self.writer.submit(run)

    def metas(self) -> dict[int, dict[str, Any]]:
        """``meta`` of every checkpoint by step, as if the one that is being written were complete.

        Rank 0's.
        """
        metas: dict[int, dict[str, Any]] = {}
        if distributed.is_rank_zero():
            pending = (
                self._pending
                if self._pending is not None and not self._pending.result.done()
                else None
            )
            metas = checkpoint.saved_metas(self.directory)
            if pending is not None:
                gone = {*pending.later, *pending.outdated}
                metas = {step: meta for step, meta in metas.items() if step not in gone}
                metas[pending.step] = json.loads(pending.meta)["meta"]
        return dict(distributed.broadcast_from_rank0([*metas.items()]))

    def check(self) -> None:
        """Raise the error of the checkpoint in the background, if there is one.

        Every rank must call it.

        Raises:
            CheckpointError: It could not be written (a full disk); the others stay as they are.
        """
        if self._pending is None:
            return
        result = self._pending.result
        failed = result.done() and result.exception() is not None
        state = distributed.reduce_metrics(
            {"failed_max": float(failed), "running_max": float(not result.done())}
        )
        if state["failed_max"]:
            # The other ranks fail too, with the same message if it was a file that could not be
            # written.
            pending, self._pending = self._pending, None
            pending.result.result()
            raise CheckpointError(
                _unwritten(self.directory, pending.step, "rank 0 could not complete it")
            )
        if not state["running_max"]:
            self._pending = None

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk; every rank must call it.

        Raises as :meth:`check` does.
        """
        if self._pending is not None:
            wait([self._pending.result])
            self.check()

    def load_latest(self) -> Checkpoint | None:
        """See :func:`checkpoint.load_latest`; what is being written is finished first."""
        self.finish()
        return checkpoint.load_latest(self.directory)

    def __enter__(self) -> CheckpointManager:
        forget_peak()  # what loading took, training does not need
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
            return
        # Other ranks may be gone: no collective operation.
        jobs = [self._pending.result] if self._pending is not None else []
        jobs += [self._attached] if self._attached is not None else []
        self._pending = self._attached = None
        for job in wait(jobs, None if isinstance(error, Exception) else INTERRUPT_SECONDS).done:
            if job.exception() is not None:
                logger.warning("%s", job.exception())

    def _write_uncopied(self, pending: PendingCheckpoint, groups: list[dict[str, Piece]]) -> None:
        """Write the pieces that were not copied.

        An error is left to the thread, which tells the other ranks.
        """
        if not self._has_warned:
            self._has_warned = True
            copied = sum(map(bytes_of, pending.pieces.values()))
            rest = 0
            for group in groups:
                rest += sum(map(bytes_of, group.values()))
            logger.warning(
                "rank %d: host memory has room for a copy of %.0f of the %.0f MiB of this checkpoint: training waits "
                "until the rest is written", distributed.rank(), copied / 2**20, (copied + rest) / 2**20,
            )  # fmt: skip
        try:
            for group in groups:
                on_host = {
                    name: replace(each, values=each.values.cpu().contiguous())
                    for name, each in group.items()
                }
                self._write_file(pending, on_host)
        except Exception as error:
            pending.error = error

    def _write_file(self, pending: PendingCheckpoint, pieces: Mapping[str, Piece]) -> None:
        building = self._building(pending.step)
        building.mkdir(exist_ok=True)
        rank, ranks = distributed.rank(), distributed.world_size()
        path = building / checkpoint.state_file(rank, ranks, len(pending.files))
        pending.files.append(path)
        write_pieces(path, pieces)

    def _building(self, step: int) -> Path:
        return self.directory / f"{BUILDING}{step:06d}"

    def _write(self, pending: PendingCheckpoint) -> None:
        """Write this rank's copies and, on rank 0, complete the checkpoint.

        In the background thread.
        """
        digests, failure, cause = {}, "", pending.error
        try:
            if pending.error is not None:
                raise pending.error
            if pending.pieces or not pending.files:
                self._write_file(pending, pending.pieces)
            pending.pieces = {}  # frees the copies
            for path in pending.files:
                fsync_path(path)
                digests[path.name] = sha256_file(path)
            if pending.attached is not None:
                pending.attached.result()
        except Exception as error:
            failure, cause = _reason(error), error
        written = distributed.every_rank([digests, failure], self._group)
        failures = [failed for _, failed in written if failed]
        try:
            if not failures and distributed.is_rank_zero():
                digests_of_ranks: dict[str, str] = {}
                for hashes, _ in written:
                    digests_of_ranks |= hashes
                self._complete(pending, digests_of_ranks)
        except OSError as error:
            failures, cause = [_reason(error)], error
        if failures:
            if distributed.is_rank_zero():
                shutil.rmtree(self._building(pending.step), ignore_errors=True)
            raise CheckpointError(_unwritten(self.directory, pending.step, failures[0])) from cause
        if self.store is not None:
            self.store.publish(self.directory.parent, pending.step, pending.keep)

    def _complete(self, pending: PendingCheckpoint, digests: dict[str, str]) -> None:
        building = self._building(pending.step)
        for path in pending.lines:
            fsync_path(path)
        _write_text(building / META, pending.meta)
        _write_text(building / MANIFEST, json.dumps(digests | {META: sha256_file(building / META)}))
        fsync_path(building)
        for step in pending.later:
            checkpoint.drop(self.directory, step)
        os.replace(building, checkpoint.folder_of(self.directory, pending.step))
        fsync_path(self.directory)
        for step in pending.outdated:
            with suppress(OSError):
                checkpoint.drop(self.directory, step)


def _unwritten(directory: Path, step: int, reason: str) -> str:
    what, remedy = reason, "resolve that"
    if any(words in reason for words in NO_ROOM_WORDS):
        remedy = "make room"
    if "No space left" in reason:
        what = "no space left on the device"
    before = [number for number in checkpoint.saved_steps(directory) if number < step]
    where = f"goes on from step {before[-1]}" if before else "starts over"
    return (
        f"the checkpoint of step {step} could not be written to {directory}: {what}; "
        f"{remedy} and run again: it {where}"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError | SafetensorError | RlhfError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    fsync_path(path)


@dataclass
class RunCheckpoints:
    """The checkpoints of one run, and what they restore.

    Attributes:
        manager: Writes and reads them.
        engines: The engines of the run by name.
        lines: Its line files by name.
        keep: How many of the newest checkpoints are kept.
        keep_from: From which step on older ones are kept too, for a coming rollback.
    """

    manager: CheckpointManager
    engines: Mapping[str, Engine]
    lines: Mapping[str, History]
    keep: int
    keep_from: int | None = None

    def save(self, step: int, meta: Mapping[str, Any], extra: bool = False) -> None:
        """Save the state after ``step`` steps or iterations.

        It consists of engines, generators, line offsets and ``meta`` (JSON).

        It is written in the background; see ``CheckpointManager.save``. An ``extra`` checkpoint is
        that of a run that is preempted between two regular ones. It does not count among the kept
        ones and is deleted with the next regular one: what there is to roll back to must not depend
        on when a run was interrupted.
        """
        tensors, generators = rng_state()
        pieces = {name: Piece.whole(tensor) for name, tensor in tensors.items()}
        engines: dict[str, Any] = {}
        for name, engine in self.engines.items():
            own, engines[name] = engine.state()
            pieces |= {f"{name}/{key}": piece for key, piece in own.items()}
        content = {
            "run": dict(meta),
            "rng": generators,
            "engines": engines,
            "lines": {name: lines.mark() for name, lines in self.lines.items()},
            "extra": extra,
        }
        earlier = self.manager.metas()
        spare = {number for number, other in earlier.items() if other["extra"] and not extra}
        keep = len(earlier) + 1 if extra else self.keep
        paths = [lines.path for lines in self.lines.values()]
        self.manager.save(step, pieces, content, keep, self.keep_from, spare, paths)

    def metas(self) -> dict[int, dict[str, Any]]:
        """``meta`` of every readable regular checkpoint by its step.

        The one that is being written is among them.
        """
        return {
            step: content["run"]
            for step, content in self.manager.metas().items()
            if not content["extra"]
        }

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of ``step``, regular or extra."""
        return step in self.manager.metas()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest sound checkpoint.

        Returns:
            Its step and ``meta``; None for a fresh start, which clears what a run left that ended
            before its first checkpoint.

        Raises:
            CheckpointError: A line file is not the one that the checkpoint was written beside.
        """
        newest = self.manager.load_latest()
        if newest is not None:
            self._require_lines(newest)
        for name, lines in self.lines.items():
            lines.truncate(int(newest.meta["lines"][name]["bytes"]) if newest else 0)
        if newest is None:
            return None
        for name, engine in self.engines.items():
            engine.load_state(newest.tensors.under(f"{name}/"), newest.meta["engines"][name])
        tensors = newest.tensors
        generators = {
            name: tensors.whole(name) for name in sorted(tensors.names) if name.startswith("rng.")
        }
        set_rng_state(generators, newest.meta["rng"])
        return newest.step, newest.meta["run"]

    def _require_lines(self, newest: Checkpoint) -> None:
        """Raise ``CheckpointError`` on every rank if a line file of rank 0 has lost lines.

        They were there at the checkpoint.
        """
        foreign = [
            lines.path
            for name, lines in self.lines.items()
            if not lines.begins_as(newest.meta["lines"][name])
        ]
        found = distributed.broadcast_from_rank0([str(path) for path in foreign])
        if found:
            raise not_of_one_run(
                self.manager.directory.parent, newest.step, f"{found[0]} does not hold its lines"
            )


def not_of_one_run(work: Path, step: int, what: str) -> CheckpointError:
    """The error of a partial state whose files do not belong together."""
    return CheckpointError(
        f"the partial state in {work} is not of one run: {what} up to the checkpoint of step {step}; delete the "
        "folder to start over"
    )

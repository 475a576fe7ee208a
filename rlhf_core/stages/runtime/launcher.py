"""Starts the ranks of a stage and reports their failures: torchrun's agent inside the stage's
process.

The ranks are children of this process, so that stopping it stops them too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_OK, DataError, Preempted, RlhfError
from rlhf_core.redaction import redacted
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.runtime.rank_marks import FOLDER_VARIABLE
from rlhf_core.stages.runtime.rank_watch import RankWatch
from rlhf_core.storage.files import atomic_write_json, read_json

OUTCOMES = Path(".rlhf") / "outcomes"


@dataclass(frozen=True)
class StageExit:
    """Exit code and message of one run of a stage. Times are seconds since the epoch."""

    stage: str
    exit_code: int
    message: str
    started: float
    ended: float

    @classmethod
    def now(
        cls, stage: str, started: float, seconds: float, error: BaseException | None
    ) -> StageExit:
        """The outcome of a stage that ends now, by ``error`` or well.

        It took ``seconds`` by a clock that no change of the date moves.
        """
        code, message = EXIT_OK, "done"
        if isinstance(error, RlhfError):
            code, message = error.exit_code, str(error)
        elif isinstance(error, KeyboardInterrupt):
            code, message = EXIT_INTERRUPTED, "interrupted"
        elif error is not None:
            code, message = 1, redacted(f"{type(error).__name__}: {error}")
        return cls(stage, code, message, started, started + seconds)

    def save(self, path: Path) -> None:
        """Write it as JSON, with the ``seconds`` that the stage took."""
        atomic_write_json(path, asdict(self) | {"seconds": round(self.ended - self.started, 3)})

    @classmethod
    def load(cls, path: Path) -> StageExit | None:
        """Return the outcome in ``path``; None if the file does not exist or holds no outcome."""
        if not path.is_file():
            return None
        try:
            record = read_json(path)
            return cls(**{field.name: record[field.name] for field in fields(cls)})
        except (DataError, KeyError, TypeError):
            return None


def outcome_path(folder: Path, stage: str, rank: int | None = None) -> Path:
    """Where a stage leaves its outcome, or one of its ranks its own."""
    return folder / (f"{stage}.json" if rank is None else f"{stage}.rank-{rank}.json")


# The agent installs handlers for these and does not restore them. Not SIGTERM: it would grant the
# ranks 30 seconds.
HANDLED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
RANK = ("-m", "rlhf_core.stages.runtime.rank")


def is_rank() -> bool:
    """Whether a launcher (this one, torchrun, Slurm's srun with its variables) has made this
    process one of several.
    """
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """Number of this process among them."""
    return int(os.environ.get("RANK", "0"))


def launch(
    name: str,
    workspace: Path,
    config: LaunchConfig,
    stop_grace: float,
    preemption: PreemptionSignal,
) -> None:
    """Run the stage on ``config.processes`` ranks here, together with those of other machines.

    SIGTERM is forwarded to the ranks, which stop together at their next safe point. Every machine
    runs the same command on the same (shared) workspace.

    Args:
        name: Name of the stage.
        workspace: Its workspace.
        config: How many ranks, and how long they wait for each other.
        stop_grace: Seconds after SIGTERM in which ranks that wait for a late one are not ended.
        preemption: What has received SIGTERM.

    Raises:
        RlhfError: A rank failed, with the cause and its exit code, or was late, or a machine did
            not come. The other ranks are stopped first.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    outcomes = workspace / OUTCOMES
    for old in outcomes.glob(f"{name}.rank-*.json"):
        old.unlink(missing_ok=True)
    # Without a cap the ranks oversubscribe the CPU.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // config.processes, 1)))
    command = (*RANK, name, str(workspace), str(os.getpid()))
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    meeting: dict[str, Any] = {}
    run = uuid.uuid4().hex
    if config.nodes > 1:
        from rlhf_core.stages.runtime.machines import BACKEND, Meeting

        place = Meeting(name, config)
        place.arrive()
        run = place.run
        meeting = {
            "rdzv_backend": BACKEND,
            "rdzv_configs": {"meeting": place},
            "local_addr": place.own_name,
        }
    # All machines see the marks of all ranks; the agent's folder is this machine's own.
    marks = workspace / ".rlhf" / "ranks" / run
    logs = workspace / ".rlhf" / "ranks" / uuid.uuid4().hex
    for folder in (marks, logs):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER_VARIABLE] = str(marks)
    watch = RankWatch(name, marks, config, stop_grace, lambda: preemption.received, _signal_ranks)
    try:
        with watch, preemption.forwarded(_signal_ranks):
            elastic_launch(_agent(config, logs, run, meeting), sys.executable)(*command)
    except ChildFailedError as error:
        if watch.verdict is not None:
            ended = Preempted if preemption.received else RlhfError
            raise ended(watch.verdict, None if preemption.received else 1) from error
        raise _failure(name, config, error.failures, outcomes, preemption.received) from error
    except RendezvousError as error:
        raise RlhfError(
            f"{name}: the machine at {config.rendezvous} is gone, so the ranks here were ended; run the stage again "
            "on all machines: it goes on from its last checkpoint",
            exit_code=1,
        ) from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    finally:
        os.environ.pop(FOLDER_VARIABLE, None)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for folder in (marks, logs):
            shutil.rmtree(folder, ignore_errors=True)
    for done in outcomes.glob(f"{name}.rank-*.json"):
        done.unlink(missing_ok=True)


def _agent(config: LaunchConfig, logs: Path, run: str, meeting: Mapping[str, Any]) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig as AgentConfig

    alone: dict[str, Any] = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
    }
    return AgentConfig(
        min_nodes=config.nodes,
        max_nodes=config.nodes,
        nproc_per_node=config.processes,
        run_id=run,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in HANDLED),
        **(meeting or alone),
    )


def _signal_ranks(number: int = signal.SIGTERM) -> bool:
    """Send a signal to the ranks of this machine; False when none has been started yet."""
    any_started = False
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.environ().get("WORLD_SIZE", "1") != "1":
                any_started = True
                child.send_signal(number)
    return any_started


def _failure(
    name: str, config: LaunchConfig, failures: Mapping[int, Any], outcomes: Path, preempted: bool
) -> RlhfError:
    """The cause of a launch's failure: a rank that was killed, else the one that failed first."""
    reported: dict[int, StageExit] = {}
    for number in failures:
        outcome = StageExit.load(outcome_path(outcomes, name, number))
        if outcome is not None and outcome.exit_code not in (
            EXIT_OK,
            EXIT_INTERRUPTED,
        ):  # it names a cause
            reported[number] = outcome
    if preempted and not reported:
        return Preempted(
            f"{name} was stopped by SIGTERM before its ranks had begun; the same command starts it"
        )
    for number, failure in failures.items():
        if number not in reported and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return RlhfError(
                f"{name}: rank {number} of {config.ranks} was killed by {failure.signal_name()} (process "
                f"{failure.pid}), so the others were stopped. SIGKILL mostly means that memory ran out. Run the stage "
                "again: it goes on from its last checkpoint",
                exit_code=1,
            )
    first = (
        min(reported, key=lambda number: (reported[number].ended, number))
        if reported
        else min(failures)
    )
    if first not in reported:
        why = f"exit code {failures[first].exitcode}, and it exited without reporting an outcome"
    elif reported[first].exit_code != 1:
        return RlhfError(reported[first].message, reported[first].exit_code)
    else:
        why = reported[first].message
    return RlhfError(f"{name}: rank {first} of {config.ranks} failed: {why}", exit_code=1)

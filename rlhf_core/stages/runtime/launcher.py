"""Starts the ranks of a stage, watches them and tells what went wrong: torchrun's agent, inside the stage's process.

The ranks are children of this process, so whoever stops it (a guard, Ctrl-C) stops them too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from rlhf_core import preemption
from rlhf_core.config.launch import LaunchConfig
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_OK, Preempted, RlhfError
from rlhf_core.files import read_json

# The agent takes these over and does not give them back. Not SIGTERM: at that it would give the ranks half a minute.
HANDLED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
RANK = ("-m", "rlhf_core.stages.runtime.rank")


def is_rank() -> bool:
    """Whether a launcher (this one, torchrun, Slurm's srun with its variables) has made this process one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """Number of this process among them."""
    return int(os.environ.get("RANK", "0"))


def rank_outcome(folder: Path, name: str, number: int) -> Path:
    """Where rank ``number`` of stage ``name`` leaves its outcome."""
    return folder / f"{name}.rank-{number}.json"


def launch(name: str, workspace: Path, config: LaunchConfig, outcomes: Path) -> None:
    """Run the stage on ``config.processes`` ranks here, together with other machines if there are to be any.

    ``RlhfError`` with the cause and its exit code when a rank fails; the others are stopped first. SIGTERM is passed on
    to the ranks, which end together at their next safe point. Every machine runs the same command on the same (shared)
    workspace.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for old in outcomes.glob(f"{name}.rank-*.json"):
        old.unlink(missing_ok=True)
    # Ranks that each take all cores for themselves bring one another to a halt.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // config.processes, 1)))
    logs = workspace / ".rlhf" / "ranks" / uuid.uuid4().hex
    words = (*RANK, name, str(workspace), str(os.getpid()))
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        with preemption.relayed(_tell_ranks):
            elastic_launch(_agent(name, config, logs), sys.executable)(*words)
    except ChildFailedError as error:
        raise _failure(name, config, error.failures, outcomes) from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        shutil.rmtree(logs, ignore_errors=True)
    for done in outcomes.glob(f"{name}.rank-*.json"):
        done.unlink(missing_ok=True)


def _agent(name: str, config: LaunchConfig, logs: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig as AgentConfig

    alone = config.nodes == 1
    logs.mkdir(parents=True, exist_ok=True)
    return AgentConfig(
        min_nodes=config.nodes,
        max_nodes=config.nodes,
        nproc_per_node=config.processes,
        run_id=uuid.uuid4().hex if alone else f"rlhf-{name}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0" if alone else str(config.rendezvous),
        local_addr="127.0.0.1" if alone else None,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in HANDLED),
    )


def _tell_ranks() -> bool:
    """Pass SIGTERM on; False when no rank has been started yet."""
    ranks = [child for child in psutil.Process().children() if _is_rank_process(child)]
    for child in ranks:
        with contextlib.suppress(psutil.Error):
            child.terminate()
    return bool(ranks)


def _is_rank_process(process: psutil.Process) -> bool:
    try:
        return process.environ().get("WORLD_SIZE", "1") != "1"
    except psutil.Error:
        return False


def _failure(name: str, config: LaunchConfig, failures: Mapping[int, Any], outcomes: Path) -> RlhfError:
    """What to tell of the failed ranks: of one that was killed, else of the one that ended first."""
    told = {number: _told(rank_outcome(outcomes, name, number)) for number in failures}
    if preemption.heard() and not any(told.values()):
        return Preempted(f"{name} was stopped by SIGTERM before its ranks had begun; the same command starts it")
    for number, failure in failures.items():
        if told[number] is None and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return _error(
                f"{name}: rank {number} of {config.ranks} was killed by {failure.signal_name()} (process "
                f"{failure.pid}), so the others were stopped. SIGKILL mostly means that memory ran out. Run the stage "
                "again: it goes on from its last checkpoint",
                1,
            )
    ended = [(float(outcome["ended"]), number) for number, outcome in told.items() if outcome is not None]
    number = min(ended)[1] if ended else min(failures)
    outcome = told[number]
    if outcome is not None and outcome["exit_code"] != 1:
        return _error(str(outcome["message"]), int(outcome["exit_code"]))
    why = outcome["message"] if outcome is not None else f"exit code {failures[number].exitcode} without a word"
    return _error(f"{name}: rank {number} of {config.ranks} failed: {why}", 1)


def _error(message: str, exit_code: int) -> RlhfError:
    error = RlhfError(message)
    error.exit_code = exit_code
    return error


def _told(path: Path) -> dict[str, Any] | None:
    """The outcome a rank left, unless it has none or only says that it was stopped."""
    if not path.is_file():
        return None
    outcome: dict[str, Any] = read_json(path)
    return None if outcome["exit_code"] in (EXIT_OK, EXIT_INTERRUPTED) else outcome

"""Starting guarded commands, and knowing processes again by pid and birth (pids are reused)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OWNER_VARIABLE = "RLHF_OWNER"
GUARD_SLACK_SECONDS = 6.0


@dataclass
class SupervisedProcess:
    """A command running under the supervisor. ``grace`` is the seconds between its stop signal and KILL."""

    name: str
    process: subprocess.Popen[bytes]
    grace: float

    def poll(self) -> int | None:
        """Exit status of the command (128 + signal when killed), or None while it runs."""
        code = self.process.poll()
        return None if code is None else (128 - code if code < 0 else code)

    def request_stop(self) -> None:
        """Ask the guard to stop the command and everything it started; returns at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def stop(self) -> int:
        """Stop the command and all its descendants, and wait for that."""
        self.request_stop()
        try:
            self.process.wait(self.grace + GUARD_SLACK_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return self.poll() or 0


def start_supervised(
    command: Sequence[str],
    *,
    name: str,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    grace: float = 5.0,
    stop_signal: str = "TERM",
    keep: Sequence[int] = (),
) -> SupervisedProcess:
    """Start ``command`` under a guard that watches this process; its output is appended to ``log``.

    The guard, not the command, holds the descriptors ``keep`` open until all that the command started has ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    guard = [sys.executable, "-m", "flows.supervision.supervisor", "--parent", str(os.getpid())]
    guard += ["--grace", str(grace), "--stop-signal", stop_signal, "--"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*guard, *command],
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(keep),
        )
    return SupervisedProcess(name, process, grace)


def birth(pid: int) -> str | None:
    """When process ``pid`` began, in a form that compares equal as long as it lives; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return _birth_elsewhere(pid)


def _birth_elsewhere(pid: int) -> str | None:
    """The same where there is no /proc."""
    import psutil

    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.Error:
        return None


def is_alive(pid: int, born: str) -> bool:
    """Whether the process that had ``pid`` and began at ``born`` still runs."""
    return birth(pid) == born


def ownership_tag(workspace: Path) -> str:
    """Put into the environment of everything this process starts, so that leftovers can be told later."""
    return f"{os.getpid()}:{birth(os.getpid())}:{workspace}"


def leftover_processes(workspace: Path) -> list[int]:
    """Pids of processes that an ended run of ``workspace`` started and that still live."""
    import psutil

    mine = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            pid, born, place = process.environ().get(OWNER_VARIABLE, "::").split(":", 2)
            ended = place == str(workspace) and not is_alive(int(pid), born)
            if ended and process.pid not in mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def kill_leftover_processes(workspace: Path, patience: float = 3.0) -> int:
    """Let a dead run's guards finish for ``patience`` seconds, then KILL what remains. Returns how many it killed."""
    import psutil

    deadline = time.monotonic() + patience
    while (pids := leftover_processes(workspace)) and time.monotonic() < deadline:
        time.sleep(0.2)
    killed = set()
    for _ in range(50):
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
                killed.add(pid)
        if not (pids := leftover_processes(workspace)):
            break
        time.sleep(0.1)
    return len(killed)

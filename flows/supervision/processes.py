"""Supervised commands, and the identity of processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.supervision.log_reader import LogReader
from flows.supervision.signals import STOP

OWNER_VARIABLE = "RLHF_OWNER"
SUPERVISOR_SLACK_SECONDS = 6.0
POLL_SECONDS = 0.1


@dataclass
class SupervisedProcess:
    """A command that runs under ``flows.supervision.supervisor``.

    ``grace`` is the number of seconds between the stop signal and SIGKILL.
    """

    name: str
    process: subprocess.Popen[bytes]
    grace: float

    def poll(self) -> int | None:
        """Return the exit status of the command (128 + signal if a signal ended it), or None while it runs."""
        code = self.process.poll()
        return None if code is None else (128 - code if code < 0 else code)

    def request_stop(self) -> None:
        """Ask the supervisor to stop the command and all its descendants; return at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def stop(self) -> int:
        """Stop the command and all its descendants, wait for that, and return the exit status."""
        self.request_stop()
        try:
            self.process.wait(self.grace + SUPERVISOR_SLACK_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return self.poll() or 0

    def wait_or_stop(self) -> int:
        """Wait for the command, or stop it once the stop flag is raised; return the exit status.

        The command never outlives this call, not even when the call is interrupted by an exception.
        """
        try:
            while (code := self.poll()) is None and not STOP.wait(POLL_SECONDS):
                pass
            return code if code is not None else self.stop()
        except BaseException:
            self.stop()
            raise


@dataclass(frozen=True)
class SupervisedResult:
    """Exit status of a supervised command, and the output that it added to its log."""

    exit_code: int
    output: str


def start_supervised(
    command: Sequence[str],
    *,
    name: str,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    grace: float = 5.0,
    stop_signal: str = "TERM",
    inherited_descriptors: Sequence[int] = (),
) -> SupervisedProcess:
    """Start ``command`` under a supervisor that also watches this process; its output is appended to ``log``.

    The supervisor, not the command, keeps ``inherited_descriptors`` open until every descendant of the command has
    ended: a file lock among them is held for that long.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    supervisor = [sys.executable, "-m", "flows.supervision.supervisor", "--parent", str(os.getpid())]
    supervisor += ["--grace", str(grace), "--stop-signal", stop_signal, "--"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*supervisor, *command],
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(inherited_descriptors),
        )
    return SupervisedProcess(name, process, grace)


def run_supervised(
    command: Sequence[str],
    *,
    name: str,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    grace: float = 5.0,
    inherited_descriptors: Sequence[int] = (),
) -> SupervisedResult:
    """Run ``command`` under a supervisor until it ends or the stop flag is raised."""
    appended = LogReader(log)
    process = start_supervised(
        command, name=name, cwd=cwd, env=env, log=log, grace=grace, inherited_descriptors=inherited_descriptors
    )
    exit_code = process.wait_or_stop()
    return SupervisedResult(exit_code, appended.text())


def start_token(pid: int) -> str | None:
    """Return a token for the start time of process ``pid``, None when there is no such process.

    Pids are reused; pid and token together identify one process for good.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):  # no such process, or a system without /proc
        import psutil

        try:
            return f"{psutil.Process(pid).create_time():.0f}"
        except psutil.Error:
            return None


def is_alive(pid: int, token: str) -> bool:
    """Whether the process that had ``pid`` and this :func:`start_token` still runs."""
    return start_token(pid) == token


def ownership_tag(workspace: Path) -> str:
    """Return the tag that marks, in their environment, the processes this process starts for ``workspace``."""
    return f"{os.getpid()}:{start_token(os.getpid())}:{workspace}"

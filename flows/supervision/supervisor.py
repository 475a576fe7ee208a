"""A small process that runs one command and leaves none of its descendants behind.

Usage: ``python -m flows.supervision.supervisor --parent PID [--grace S] [--stop-signal TERM|INT] --
COMMAND …``

COMMAND runs in a session of its own. When it ends, the supervisor receives a stop signal, or
process PID dies, every descendant is stopped, including orphans and processes in other sessions:
the supervisor is their subreaper. Descendants of a nested supervisor are stopped by that one.
COMMAND dies with its supervisor (PDEATHSIG). The exit status is that of COMMAND, or 128 + signal.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_SECONDS = 0.5
KILL_SECONDS = 5.0


class Supervisor:
    """Runs ``command`` until it ends, a stop signal arrives or ``parent`` dies; then stops all
    descendants.
    """

    def __init__(self, command: Sequence[str], parent: int, grace: float, stop_signal: int) -> None:
        self.command = list(command)
        self.parent = parent
        self.grace = grace
        self.stop_signal = stop_signal
        self.stopping = False
        self.status: int | None = None
        self.child = 0
        self._prctl = _prctl()
        self._wake, self._wake_in = os.pipe()

    def run(self) -> int:
        """Run the command and return its exit status (128 + signal when a signal ended it)."""
        self._install_handlers()
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        parent_fd = _open_pidfd(self.parent)
        if os.getppid() != self.parent:
            return 128 + signal.SIGTERM
        self.child = self._start()
        while self.status is None and not self.stopping:
            watched = [self._wake] if parent_fd is None else [self._wake, parent_fd]
            ready, _, _ = select.select(watched, [], [], POLL_SECONDS)
            if self._wake in ready:
                os.read(self._wake, 4096)
            self._reap()
            self.stopping = self.stopping or os.getppid() != self.parent
        self._stop_descendants()
        return self.status if self.status is not None else 128 + signal.SIGKILL

    def _install_handlers(self) -> None:
        """Set every handler explicitly: under a shell's ``&`` SIGINT is inherited as ignored."""
        os.set_blocking(self._wake_in, False)
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)
        for number in HANDLED:
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _on_stop(self, *_: object) -> None:
        self.stopping = True

    def _start(self) -> int:
        supervisor = os.getpid()

        def prepare_child() -> None:
            signal.set_wakeup_fd(-1)
            for number in (*HANDLED, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(128 + signal.SIGKILL)

        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=prepare_child,
            )
        except OSError as error:
            sys.stderr.write(f"cannot start {self.command[0]}: {error.strerror}\n")
            raise SystemExit(127) from error
        process.returncode = 0  # _reap waits for the command and for orphans alike
        return process.pid

    def _reap(self) -> None:
        """Wait for every ended child: the command itself, and descendants whose parent has died."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = (
                    128 + os.WTERMSIG(status)
                    if os.WIFSIGNALED(status)
                    else os.waitstatus_to_exitcode(status)
                )

    def _stop_descendants(self) -> None:
        """Send the stop signal to all descendants, then SIGKILL to those that are left after the
        grace period.

        A nested supervisor stops its own descendants with the signal meant for them: it alone is
        signalled here.
        """
        signalled: set[int] = set()
        deadline = time.monotonic() + self.grace
        while (alive := self._descendants()) and time.monotonic() < deadline:
            for process in _not_under_nested_supervisor(alive):
                if process.pid not in signalled:
                    signalled.add(process.pid)
                    _send(process, self.stop_signal)
            time.sleep(0.05)
        deadline = time.monotonic() + KILL_SECONDS
        while (alive := self._descendants()) and time.monotonic() < deadline:
            for process in alive:
                _send(process, signal.SIGKILL)
            time.sleep(0.05)

    def _descendants(self) -> list[psutil.Process]:
        self._reap()
        try:
            return psutil.Process().children(recursive=True)
        except psutil.Error:
            return []


def _not_under_nested_supervisor(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Drop the descendants of supervisors among ``processes``; the supervisors themselves stay."""
    parents, supervisors = dict[int, int](), set[int]()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = process.ppid()
            if "flows.supervision.supervisor" in process.cmdline():
                supervisors.add(process.pid)

    def is_supervised(pid: int) -> bool:
        parent = parents.get(pid)
        return parent is not None and (parent in supervisors or is_supervised(parent))

    return [process for process in processes if not is_supervised(process.pid)]


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _prctl() -> Any:
    """Return Linux's prctl, or a function that does nothing on other systems."""
    libc = ctypes.CDLL(None)
    return getattr(libc, "prctl", None) or ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_int, ctypes.c_int
    )(lambda *_: 0)


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when ``pid`` dies; None where the kernel has no
    pidfd.
    """
    opener = getattr(os, "pidfd_open", None)
    try:
        return opener(pid) if opener else None
    except OSError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and supervise the command."""
    parser = argparse.ArgumentParser(prog="flows.supervision.supervisor", description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--stop-signal", choices=("TERM", "INT"), default="TERM")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    stop_signal = signal.SIGINT if arguments.stop_signal == "INT" else signal.SIGTERM
    return Supervisor(command, arguments.parent, arguments.grace, stop_signal).run()


if __name__ == "__main__":
    sys.exit(main())

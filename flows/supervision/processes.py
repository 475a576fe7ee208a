"""Supervised commands, their environment and logs, short Python commands, and the identity of
processes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.supervision.signals import STOP


class LogReader:
    """Reads the part of a log file from byte ``start`` on, by default what is appended after the
    reader was created.

    The file may not exist yet.
    """

    def __init__(self, log: Path, start: int | None = None) -> None:
        self.log = log
        if start is None:
            start = log.stat().st_size if log.exists() else 0
        self.start = start

    def lines(self, most: int = -1, unfinished: bool = False) -> bytes:
        """Return at most ``most`` bytes from ``start`` on in whole lines; whoever has used them
        moves ``start`` on.

        Of a longer line as much as is read.

        Args:
            unfinished: Return a last line that has no end yet, too.
        """
        if not self.log.exists():
            return b""
        with self.log.open("rb") as stream:
            stream.seek(self.start)
            chunk = stream.read(most)
        whole = chunk[: chunk.rfind(b"\n") + 1]
        if len(chunk) == most:
            return whole or chunk
        return chunk if unfinished else whole

    def text(self, last_bytes: int | None = None) -> str:
        """Return everything appended so far, or only its last ``last_bytes`` bytes."""
        if not self.log.exists():
            return ""
        start = (
            self.start
            if last_bytes is None
            else max(self.start, self.log.stat().st_size - last_bytes)
        )
        with self.log.open("rb") as stream:
            stream.seek(start)
            return stream.read().decode("utf-8", errors="replace")


ERROR_PREFIX = "ERROR: "


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command that has ended; the log of a supervised one, ``stdout``,
    holds both.
    """

    exit_code: int
    stdout: str
    stderr: str = ""

    @property
    def error_line(self) -> str:
        """The line that explains a failure: DVC's last ``ERROR:`` line, else the last line of
        stderr or stdout.
        """
        lines = [
            line.strip()
            for line in [*self.stdout.splitlines(), *self.stderr.splitlines()]
            if line.strip()
        ]
        return [f"exit code {self.exit_code}", *lines, *dvc_errors(self.stderr)][-1]


def dvc_errors(output: str) -> list[str]:
    """Return the lines in which DVC reports errors, without their prefix ``ERROR:``."""
    return [
        line.removeprefix(ERROR_PREFIX)
        for line in output.splitlines()
        if line.startswith(ERROR_PREFIX)
    ]


OWNER_VARIABLE = "RLHF_OWNER"  # marks every process of a workspace
SUPERVISOR_SLACK_SECONDS = 6.0
POLL_SECONDS = 0.1


@dataclass
class SupervisedProcess:
    """A command that runs under ``flows.supervision.supervisor``.

    ``grace`` is the number of seconds between the stop signal and SIGKILL; ``appended`` reads the
    command's output.
    """

    name: str
    process: subprocess.Popen[bytes]
    grace: float
    appended: LogReader

    def poll(self) -> int | None:
        """Return the exit status of the command (128 + signal if a signal ended it), or None while
        it runs.
        """
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

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

    def result(self) -> CommandResult:
        """Wait for the command, or stop it once the stop flag is raised; return its exit status and
        output.

        The command never outlives this call, not even when the call is interrupted by an exception.
        """
        try:
            while (code := self.poll()) is None and not STOP.wait(POLL_SECONDS):
                pass
            return CommandResult(code if code is not None else self.stop(), self.appended.text())
        except BaseException:
            self.stop()
            raise


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
    """Start ``command`` under a supervisor that also watches this process; its output is appended
    to ``log``.

    The supervisor, not the command, keeps ``inherited_descriptors`` open until every descendant of
    the command has ended: a file lock among them is held for that long.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    appended = LogReader(log)
    supervisor = [
        sys.executable,
        "-m",
        "flows.supervision.supervisor",
        "--parent",
        str(os.getpid()),
    ]
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
    return SupervisedProcess(name, process, grace, appended)


def start_token(pid: int) -> str | None:
    """Return a token for the start time of process ``pid``, None when there is no such process.

    Pids are reused; pid and token together identify one process for good.
    """
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
        return None if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):  # no such process, or a system without /proc
        import psutil

        try:
            return f"{psutil.Process(pid).create_time():.0f}"
        except psutil.Error:
            return None


# Of Prefect's client and logging, for every process of a worker or of its jobs. Flows send
# heartbeats, so that a lost host does not keep its pool slot.
PREFECT_SETTINGS = {
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": "flows.prefect_server.logs.Console",
    "PREFECT_LOGGING_HANDLERS_API_CLASS": "flows.prefect_server.logs.Api",
    "PREFECT_LOGGING_HANDLERS_WORKER_API_CLASS": "flows.prefect_server.logs.WorkerApi",
}
LEASES = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
CHILD_SETTINGS = {
    **PREFECT_SETTINGS,
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # MLflow's jobs judge traces of language model applications; eight processes of 180 MB wait for
    # them.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "GX_ANALYTICS_ENABLED": "false",
    "GIT_TERMINAL_PROMPT": "0",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_CLI_COLORS": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    # In memory, a restart of the server ends every run of a deployment that has a limit.
    LEASES: "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
    "PYTHONUNBUFFERED": "1",
}


def no_proxy_hosts() -> str:
    """Return the value of ``NO_PROXY`` with the loopback addresses added: local services need no
    proxy.
    """
    hosts = [
        host
        for host in os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")).split(",")
        if host
    ]
    return ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))


def child_environment(workspace: Path, **extra: str) -> dict[str, str]:
    """Return this process's environment with :data:`CHILD_SETTINGS`, the mark of the workspace, and
    ``extra``.
    """
    source = str(Path(__file__).resolve().parents[2])
    python_path = [
        source,
        *[p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != source],
    ]
    scripts = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    return {
        **os.environ,
        **CHILD_SETTINGS,
        "PYTHONPATH": os.pathsep.join(python_path),
        "PATH": path if path.split(os.pathsep)[0] == scripts else os.pathsep.join([scripts, path]),
        "NO_PROXY": no_proxy_hosts(),
        "no_proxy": no_proxy_hosts(),
        OWNER_VARIABLE: str(workspace),
        **extra,
    }


def run_module(workspace: Path, module: str, *arguments: str, **env: str) -> CommandResult:
    """Run ``python -m MODULE ARGUMENTS`` in ``workspace``, detached from the terminal, with ``env``
    on top.
    """
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=workspace,
        env=child_environment(workspace, **env),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return CommandResult(process.returncode, process.stdout, process.stderr)

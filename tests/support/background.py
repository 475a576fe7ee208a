"""Processes in the background of a test: how to run them, wait for them, and give a Prefect server
its database.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from commands import command_environment

from flows.prefect_server.services import LOOPBACK, free_port


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until ``condition`` holds; an AssertionError naming ``what`` otherwise."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.1)


def wait_for_answer(
    url: str, process: subprocess.Popen[bytes], log: Path | None = None, seconds: float = 400
) -> None:
    """Wait until a server answers at ``url``; an AssertionError with the end of its log if it ended
    before.
    """

    def answers() -> bool:
        said = log.read_text(errors="replace")[-3000:] if log is not None else ""
        assert process.poll() is None, f"the server ended; its last lines:\n{said}"
        try:
            with urllib.request.urlopen(url, timeout=30):
                return True
        except OSError:
            return False

    wait_until(answers, seconds, f"answer at {url}")


@contextmanager
def running(
    command: Sequence[str], cwd: Path, env: dict[str, str], log: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the background for the block."""
    cwd.mkdir(parents=True, exist_ok=True)
    with (cwd / log).open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_prefect_database(path: Path) -> None:
    """Keep the database of a new Prefect server at ``path``: its migrations take six seconds of a
    processor.
    """
    home = path.with_suffix(".home")
    with prefect_server(home):
        pass
    with sqlite3.connect(home / "prefect.db") as source, sqlite3.connect(path) as target:
        source.backup(target)


@contextmanager
def prefect_server(
    folder: Path, database: Path | None = None, address: str = LOOPBACK, prefix: Sequence[str] = ()
) -> Iterator[str]:
    """Run a Prefect server in ``folder``, on a copy of ``database`` if one is given, and yield its
    API address.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own, port = folder / "prefect.db", free_port()
    if database is not None:
        shutil.copy(database, own)
    connection = f"sqlite+aiosqlite:///{own}"
    env = command_environment(
        PREFECT_HOME=str(folder), PREFECT_API_DATABASE_CONNECTION_URL=connection
    )
    env.pop("PREFECT_API_URL", None)
    url = f"http://{address}:{port}/api"
    command = [
        *prefix,
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        address,
        "--port",
        str(port),
    ]
    with running(command, folder, env, "server.log") as process:
        wait_for_answer(f"{url}/health", process, folder / "server.log")
        yield url

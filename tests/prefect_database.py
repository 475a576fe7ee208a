"""The database of a new Prefect server, made once for many: its migrations take six seconds of a processor."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import command_environment

from flows.prefect_server.services import LOOPBACK, free_port

SECONDS = 400


def make_prefect_database(path: Path) -> None:
    """Start a server on a new database, stop it when it answers, and keep the database as one file at ``path``."""
    home = path.with_suffix(".home")
    home.mkdir()
    database = home / "prefect.db"
    with prefect_server(database):
        pass
    with sqlite3.connect(database) as source, sqlite3.connect(path) as target:
        source.backup(target)


@contextmanager
def prefect_server(database: Path) -> Iterator[str]:
    """Run a server on ``database``, its files beside it, and give the address of its API."""
    home, port = database.parent, free_port()
    connection = f"sqlite+aiosqlite:///{database}"
    env = command_environment(PREFECT_HOME=str(home), PREFECT_API_DATABASE_CONNECTION_URL=connection)
    env.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(f"http://{LOOPBACK}:{port}/api/health", server, home / "server.log")
        yield f"http://{LOOPBACK}:{port}/api"
    finally:
        server.terminate()
        server.wait(120)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no answer within {SECONDS} s: {log.read_text()}")

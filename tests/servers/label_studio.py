"""A real Label Studio server on loopback, on SQLite and with a token."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from flows.prefect_server.services import free_port

ACCOUNT = "annotator@example.org"
START_SECONDS = 1500  # its first start migrates an empty database, which takes minutes on a busy machine
STOP_SECONDS = 60


def find_label_studio() -> str | None:
    """Return the program: what RLHF_LABEL_STUDIO names, in an environment of its own, else one on the path."""
    return os.environ.get("RLHF_LABEL_STUDIO") or shutil.which("label-studio")


@dataclass(frozen=True)
class LabelStudio:
    """A running server, and the account that annotates."""

    url: str
    token: str
    password: str

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return what the REST interface answers."""
        headers = {"Authorization": f"Token {self.token}"}
        answer = httpx.request(method, f"{self.url}/api/{path}", json=body, headers=headers, timeout=300)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:2000]}"
        return answer.json()


@contextmanager
def label_studio(program: str, folder: Path) -> Iterator[LabelStudio]:
    """Run the server with its data in ``folder``."""
    port = free_port()
    server = LabelStudio(f"http://127.0.0.1:{port}", secrets.token_hex(20), secrets.token_hex(12))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {
        "LABEL_STUDIO_BASE_DATA_DIR": str(folder),
        "LABEL_STUDIO_ENABLE_LEGACY_API_TOKEN": "true",
        "LABEL_STUDIO_USERNAME": ACCOUNT,
        "LABEL_STUDIO_PASSWORD": server.password,
        "LABEL_STUDIO_USER_TOKEN": server.token,
        "COLLECT_ANALYTICS": "false",
        "LATEST_VERSION_CHECK": "false",
        "SENTRY_DSN": "",
        "FRONTEND_SENTRY_DSN": "",
    }
    command = [program, "start", "--no-browser", "--internal-host", "127.0.0.1", "--port", str(port)]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait(server, process, log)
        yield server
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, sent)
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    continue


def _wait(server: LabelStudio, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, f"it did not start:\n{log.read_text()[-3000:]}"
        try:
            if httpx.get(f"{server.url}/health", timeout=30).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)

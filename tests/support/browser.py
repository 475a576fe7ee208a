"""A headless Chromium that tests drive by the Chrome DevTools Protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # refused by Chromium where tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)
START_SECONDS = 60
PAGE_SECONDS = 120


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process with one tab.

    ``profile`` is an empty folder for its settings and cache. The window is high: lists that are
    below it stay empty. ``events`` has what the protocol reported, of the domains that are enabled,
    as of the last call.
    """

    def __init__(
        self, executable: str, profile: Path, width: int = 1280, height: int = 1800
    ) -> None:
        command = [
            executable,
            *OPTIONS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        with (profile / "chromium.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        port, path = self._debugging_address(profile / "DevToolsActivePort")
        self.socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None)
        self.numbers = itertools.count(1)
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]

    def _debugging_address(self, file: Path) -> tuple[str, str]:
        """Return port and path of the browser's socket, which it writes to ``file``."""
        deadline = time.monotonic() + START_SECONDS
        while not file.is_file() or len(lines := file.read_text().splitlines()) < 2:
            assert self.process.poll() is None, "Chromium exited while starting"
            assert time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.05)
        return lines[0], lines[1]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self.numbers)
        session = {"sessionId": self.session} if self.session else {}
        self.socket.send(
            json.dumps({"id": number, "method": method, "params": parameters, **session})
        )
        while True:
            message = json.loads(self.socket.recv(timeout=PAGE_SECONDS))
            if "method" in message:
                self.events.append(message)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def open(self, address: str, *expected: str) -> str:
        """Open a page and return its visible text as soon as it has every ``expected`` text."""
        self.call(
            "Page.navigate", url="about:blank"
        )  # a page that differs in its fragment alone is not loaded anew
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + PAGE_SECONDS
        while True:
            text = str(self.evaluate("document.body ? document.body.innerText : ''"))
            missing = [part for part in expected if part not in text]
            if not missing:
                return text
            assert time.monotonic() < deadline, f"{address} never showed {missing}, but:\n{text}"
            time.sleep(0.2)

    def screenshot(self, file: Path) -> None:
        """Save what the window shows as PNG."""
        file.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self) -> None:
        """End the browser and its helper processes."""
        self.socket.close()
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)

"""A second host as a network namespace: interfaces and routes of its own, and a cable to ours that can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Cable:
    """``here`` and ``there`` are the addresses of its ends; commands behind ``prefix`` run on the far side."""

    name: str
    here: str
    there: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def pull(self) -> None:
        """No packet gets through until :meth:`plug`."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def plug(self) -> None:
        _ip("-n", self.name, "link", "set", "eth0", "up")


@contextmanager
def second_host() -> Iterator[Cable]:
    """A namespace and a veth pair; the test is skipped, with the reason, where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    number = os.getpid() % 250
    cable = Cable(f"rlhf-{os.getpid()}", f"10.213.{number}.1", f"10.213.{number}.2")
    try:
        _ip("netns", "add", cable.name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        near = f"rlhf{os.getpid()}"
        _ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", cable.name)
        _ip("address", "add", f"{cable.here}/24", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", cable.name, "address", "add", f"{cable.there}/24", "dev", "eth0")
        _ip("-n", cable.name, "link", "set", "lo", "up")
        cable.plug()
        yield cable
    finally:
        _ip("netns", "delete", cable.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

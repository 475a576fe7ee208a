"""Hosts as network namespaces with interfaces and routes of their own, joined by a cable that can
be unplugged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NUMBER = os.getpid() % 250


@dataclass(frozen=True)
class Host:
    """A namespace with one interface, ``eth0``; commands after ``prefix`` run in it and see
    ``name`` as host name.
    """

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        set_name = 'hostname "$0" && exec "$@"'
        return (
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            set_name,
            self.name,
        )

    def unplug(self) -> None:
        """Unplug the cable: no packet gets through until :meth:`plug`."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def plug(self) -> None:
        """Plug the cable in again."""
        _ip("-n", self.name, "link", "set", "eth0", "up")


@contextmanager
def second_host() -> Iterator[tuple[str, Host]]:
    """Yield this host's address on a cable and the host at its other end; skip the test where that
    is not allowed.
    """
    _skip_without_namespaces()
    ours, near = f"10.213.{NUMBER}.1", f"rlhf{os.getpid()}"
    host = Host(f"rlhf-{os.getpid()}", f"10.213.{NUMBER}.2")
    with _namespace(host, {host.name: host.address}):
        _ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("address", "add", f"{ours}/24", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        host.plug()
        yield ours, host


@contextmanager
def joined_hosts(count: int) -> Iterator[list[Host]]:
    """Yield hosts that know each other by name and reach nothing else; skip the test like
    :func:`second_host`.
    """
    _skip_without_namespaces()
    hosts = [Host(f"rlhf-{os.getpid()}-{n}", f"10.214.{NUMBER}.{n}") for n in range(1, count + 1)]
    switch = Host(f"rlhf-{os.getpid()}-switch", "")
    names = {host.name: host.address for host in hosts}
    with ExitStack() as stack:
        for host in (switch, *hosts):
            stack.enter_context(_namespace(host, names))
        _ip("-n", switch.name, "link", "add", "eth0", "type", "bridge")
        switch.plug()
        for number, host in enumerate(hosts, start=1):
            port = f"port{number}"
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                host.name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch.name,
            )
            _ip("-n", switch.name, "link", "set", port, "master", "eth0", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            host.plug()
        yield hosts


@contextmanager
def _namespace(host: Host, names: dict[str, str]) -> Iterator[None]:
    """Create a namespace in which ``names`` resolve to their addresses."""
    etc = Path("/etc/netns") / host.name
    try:
        _ip("netns", "add", host.name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        etc.mkdir(parents=True)
        lines = [f"{address} {name}\n" for name, address in names.items()]
        (etc / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        _ip("-n", host.name, "link", "set", "lo", "up")
        yield
    finally:
        shutil.rmtree(etc, ignore_errors=True)
        _ip("netns", "delete", host.name)


def _skip_without_namespaces() -> None:
    missing = [
        program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None
    ]
    if missing:
        pytest.skip(f"needs the program {missing[0]}")
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

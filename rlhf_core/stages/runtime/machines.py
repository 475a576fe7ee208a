"""Where the machines of a stage meet: says who is waited for, and gives up after a while.

torch's own rendezvous decides who takes part. It waits without a word, and ends in a traceback.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import RlhfError

logger = logging.getLogger(__name__)

BACKEND = "rlhf-machines"
FIRST_NOTICE_SECONDS, NOTICE_SECONDS = 3.0, 30.0
POLL_SECONDS = 0.5
STORE_SECONDS = 20
RUN_KEY = "rlhf/run"


class Meeting:
    """The meeting point of a stage's machines.

    Args:
        stage: Name of the stage.
        config: How many machines meet where, and how long they wait.
    """

    def __init__(self, stage: str, config: LaunchConfig) -> None:
        assert config.rendezvous is not None
        self.stage, self.config = stage, config
        self.place = config.rendezvous
        self.host, _, port = config.rendezvous.rpartition(":")
        self.port = int(port)
        self.deadline = time.monotonic() + config.rendezvous_timeout
        self.run = ""  # the same on all machines, another for every run

    def arrive(self) -> None:
        """Open the meeting point if it is on this machine, else wait until it is there.

        Raises:
            RlhfError: It is not there in time, or is something else.
        """
        opens = self._is_here() and _is_free(self.port)
        if not opens:
            with self._noticed(lambda: f"the machine that opens {self.place}"):
                self._reach()
        opened = threading.Thread(target=self._open_store, args=(opens,), daemon=True)
        opened.start()
        # Where another program listens and says nothing, torch waits for ever, in C++.
        opened.join(STORE_SECONDS)
        if not self.run:
            raise RlhfError(
                f"{self.stage}: {self.place} (compute.launch.{self.stage}.rendezvous) is no meeting point of this "
                "stage: another program answers there, or may not be reached; choose a free port",
                exit_code=1,
            )
        address = self._reach()
        self._use_interface(address)
        # By its name the others have reached the machine that opened the meeting point.
        self.own_name = self.host if opens else address

    def _open_store(self, opens: bool) -> None:
        for is_master in (True, False) if opens else (False,):  # two may start on one machine
            with suppress(RuntimeError, ValueError):
                self.store = TCPStore(
                    self.host,
                    self.port,
                    is_master=is_master,
                    multi_tenant=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=STORE_SECONDS / 2),
                )
                self.run = self.store.compare_set(RUN_KEY, "", uuid.uuid4().hex).decode()
                return

    def _is_here(self) -> bool:
        """Whether the meeting point is an address of this machine."""
        try:
            found = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError:
            return False
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.bind(address)
                except OSError:
                    continue
                return True
        return False

    def _reach(self) -> str:
        """Wait until the meeting point answers, and return this machine's address on the way there."""
        why = ""
        while time.monotonic() < self.deadline:
            try:
                with socket.create_connection((self.host, self.port), timeout=2) as probe:
                    return str(probe.getsockname()[0])
            except OSError as error:
                why = error.strerror or str(error)
            time.sleep(POLL_SECONDS)
        raise self._given_up(f"the machine that opens {self.place} did not come ({why})")

    def _use_interface(self, address: str) -> None:
        """Let gloo use the interface of ``address``: it would look up the host's name, which often
        stands for 127.0.1.1.
        """
        if address.startswith("127."):
            return
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == address for each in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    def _given_up(self, what: str) -> RlhfError:
        return RlhfError(
            f"{self.stage}: {what} within {self.config.rendezvous_timeout} s "
            f"(compute.launch.{self.stage}.rendezvous_timeout); run the same command on each of the "
            f"{self.config.nodes} machines, with the same compute.launch.{self.stage}",
            exit_code=1,
        )

    @contextmanager
    def _noticed(self, whom: Callable[[], str]) -> Iterator[None]:
        """Say inside the block who is waited for, soon and then again and again."""
        ended = threading.Event()
        started = time.monotonic()

        def notice() -> None:
            pause = FIRST_NOTICE_SECONDS
            while not ended.wait(pause):
                pause = NOTICE_SECONDS
                logger.warning(
                    "%s: waiting for %s; %.0f s so far, given up after %d s (compute.launch.%s.rendezvous_timeout)",
                    self.stage, whom(), time.monotonic() - started, self.config.rendezvous_timeout, self.stage,
                )  # fmt: skip

        thread = threading.Thread(target=notice, name="machines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _Rendezvous(DynamicRendezvousHandler):
    """torch's rendezvous, which says who is missing and whose errors are lines for users."""

    meeting: Meeting

    def get_backend(self) -> str:
        """See base class."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class; ``RlhfError`` in place of torch's errors."""
        meeting, stage = self.meeting, self.meeting.stage
        try:
            with meeting._noticed(lambda: f"{self._missing()} at {meeting.place}"):
                return super().next_rendezvous()
        except RendezvousTimeoutError as error:
            raise meeting._given_up(f"{self._missing()} did not come to {meeting.place}") from error
        except (RendezvousClosedError, RendezvousConnectionError) as error:
            raise RlhfError(
                f"{stage}: another machine has ended the meeting at {meeting.place}, and says why; run the stage again "
                "on all of them",
                exit_code=1,
            ) from error

    def _missing(self) -> str:
        """How many machines are missing, and which have come."""
        nodes = self.meeting.config.nodes
        arrived = {node.addr for node in list(self._state_holder.state.participants)}
        missing = nodes - max(len(self._state_holder.state.participants), 1)
        if not missing:
            return f"a place among {nodes} machines, which have come already"
        here = ", ".join(sorted({*arrived, self.meeting.own_name}))
        return f"{missing} of {nodes} machines (here: {here})"


def _create(params: RendezvousParameters) -> _Rendezvous:
    meeting: Meeting = params.config["meeting"]
    seconds = max(meeting.deadline - time.monotonic(), 1.0)
    handler: _Rendezvous = _Rendezvous.from_backend(
        params.run_id,
        meeting.store,
        C10dRendezvousBackend(meeting.store, params.run_id),
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(join=timedelta(seconds=seconds)),
    )
    handler.meeting = meeting
    return handler


rendezvous_handler_registry.register(BACKEND, _create)


def _is_free(port: int) -> bool:
    """Whether nothing listens on ``port`` of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

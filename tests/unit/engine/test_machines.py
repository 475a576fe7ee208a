"""Machines that train together: who is waited for is said, for as long as a setting allows."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from ranks import exit_code_of, free_port

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import Preempted, RlhfError
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.runtime.rank_marks import STOPPING, Mark
from rlhf_core.stages.runtime import launcher, machines
from rlhf_core.stages.runtime.rank_watch import late_ranks

# What stands in for a rank: it says which of how many it is.
RANK = (
    "-c",
    "import os, sys; open(os.path.join(sys.argv[2], 'rank-' + os.environ['RANK']), 'w').write("
    "os.environ['WORLD_SIZE'] + ' ' + os.environ['RLHF_RANK_MARKS'])",
)


def start(
    folder: Path, seconds: int, port: int, preemption: PreemptionSignal | None = None
) -> None:
    """Start the machine's part of a stage of two machines, with a rank on each."""
    config = LaunchConfig(
        processes=1, nodes=2, rendezvous=f"127.0.0.1:{port}", rendezvous_timeout=seconds
    )
    launcher.RANK = RANK
    launcher.launch("sft", folder, config, 1.0, preemption or PreemptionSignal())


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "RANK", RANK)
    monkeypatch.setattr(machines, "FIRST_NOTICE_SECONDS", 0.3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_a_machine_that_does_not_come_is_waited_for_aloud_and_not_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with pytest.raises(RlhfError) as raised:
        start(tmp_path, 2, port)
    message = str(raised.value)
    assert raised.value.exit_code == 1 and "\n" not in message
    for part in ("1 of 2 machines", f"127.0.0.1:{port}", "within 2 s", "rendezvous_timeout"):
        assert part in message
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("waiting for 1 of 2 machines" in line and str(port) in line for line in said)
    assert not list(tmp_path.glob("rank-*"))


def test_sigterm_ends_the_wait_for_a_machine(tmp_path: Path) -> None:
    preemption = PreemptionSignal()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="stopped by SIGTERM"), preemption.handled("sft"):
        timer.start()
        start(tmp_path, 600, free_port(), preemption)


def test_a_port_of_another_program_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "STORE_SECONDS", 1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(RlhfError, match="is no meeting point of this stage") as raised:
            start(tmp_path, 5, other.getsockname()[1])
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_two_machines_meet_and_leave_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    ended: list[int] = []
    other = threading.Thread(target=lambda: ended.append(exit_code_of(start, tmp_path, 400, port)))
    other.start()
    start(tmp_path, 400, port)
    other.join()
    assert ended == [0]
    ranks = [(tmp_path / f"rank-{rank}").read_text().split() for rank in (0, 1)]
    assert [words[0] for words in ranks] == ["2", "2"]
    assert ranks[0][1] == ranks[1][1], "both leave their marks in one folder"
    assert list((tmp_path / ".rlhf/ranks").iterdir()) == []


@pytest.mark.parametrize(
    ("marks", "late"),
    [
        ({0: (5, ""), 1: (5, "")}, []),  # all compute
        ({0: (6, "a sum"), 1: (5, "")}, [1]),
        ({0: (6, "a sum"), 1: (5, ""), 2: (6, "a sum"), 3: (4, "")}, [1, 3]),
        ({0: (7, ""), 1: (6, "")}, [1]),  # a GPU's operation is waited for after it has begun
        ({0: (6, "a sum"), 1: (6, "a sum")}, [0, 1]),  # the network between them
        ({0: (6, ""), 1: (6, "a message")}, [1]),
        ({0: (6, STOPPING), 1: (6, STOPPING)}, []),
    ],
)
def test_who_has_begun_the_fewest_operations_is_late(
    marks: dict[int, tuple[int, str]], late: list[int]
) -> None:
    found = {rank: Mark(begun, name, "host", rank) for rank, (begun, name) in marks.items()}
    assert late_ranks(found)[0] == late

"""The supervisor leaves no process behind, whatever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from background import wait_until
from integration.flow_toys import environment

pytestmark = pytest.mark.services
ESCAPE = "import subprocess,sys,time; p=subprocess.Popen(['sleep','300'],start_new_session=True); "


def supervised(code: str, grace: float = 1.0) -> list[str]:
    supervisor = [
        sys.executable,
        "-m",
        "flows.supervision.supervisor",
        "--parent",
        str(os.getpid()),
    ]
    return [*supervisor, "--grace", str(grace), "--", sys.executable, "-c", code]


def read_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text(), 60, "pid file")
    return int(path.read_text())


def test_status_of_the_command_is_passed_on() -> None:
    assert subprocess.run(supervised("raise SystemExit(7)"), env=environment()).returncode == 7


def test_a_signal_that_ends_the_command_shows_in_the_status() -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    assert subprocess.run(supervised(code), env=environment()).returncode == 128 + signal.SIGKILL


def test_a_child_in_its_own_session_ends_with_the_command(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = ESCAPE + f"open({str(pid_file)!r},'w').write(str(p.pid)); raise SystemExit(0)"
    assert subprocess.run(supervised(code), env=environment()).returncode == 0
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_everything_ends_when_the_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = ESCAPE + f"open({str(pid_file)!r},'w').write(str(p.pid)); time.sleep(300)"
    launch = (
        "import subprocess,sys,os,time; "
        "subprocess.Popen([sys.executable,'-m','flows.supervision.supervisor','--parent',str(os.getpid()),"
        f"'--grace','1','--',sys.executable,'-c',{code!r}]); time.sleep(300)"
    )
    parent = subprocess.Popen([sys.executable, "-c", launch], env=environment())
    escaped = read_pid(pid_file)
    parent.kill()
    parent.wait()
    wait_until(lambda: not psutil.pid_exists(escaped), 60, "end of the escaped child")


def test_a_command_that_ignores_the_stop_signal_is_killed_also_where_sigint_is_ignored(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import os,signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(pid_file)!r},'w').write(str(os.getpid())); time.sleep(300)"
    )
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        supervisor = subprocess.Popen(supervised(code), env=environment())
    finally:
        signal.signal(signal.SIGINT, previous)
    stubborn = read_pid(pid_file)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(120) == 128 + signal.SIGKILL
    assert not psutil.pid_exists(stubborn)


def test_descendants_of_a_nested_supervisor_are_stopped_by_that_one_alone(tmp_path: Path) -> None:
    """A worker's supervisor sends SIGINT, on which a stage saves no state; the stage's own
    supervisor sends SIGTERM.
    """
    received = tmp_path / "received"
    stage = (
        "import os,signal,time\n"
        f"log = {str(received)!r}\n"
        "def note(number, _):\n"
        "    with open(log, 'a') as stream: stream.write(signal.Signals(number).name + ' ')\n"
        "    if number == 15: time.sleep(0.3); os._exit(0)\n"
        "for number in (2, 15): signal.signal(number, note)\n"
        "open(log, 'w').close()\n"
        "while True: time.sleep(0.1)\n"
    )
    worker = (
        "import os,signal,subprocess,sys; "
        "nested = subprocess.Popen([sys.executable,'-m','flows.supervision.supervisor',"
        "'--parent',str(os.getpid()),"
        f"'--grace','20','--',sys.executable,'-c',{stage!r}]); "
        # subprocess.run would kill the nested supervisor a quarter of a second after the signal
        "signal.signal(signal.SIGINT, lambda *_: None); nested.wait()"
    )
    command = supervised(worker, grace=20.0)
    command[command.index("--") : command.index("--")] = ["--stop-signal", "INT"]
    supervisor = subprocess.Popen(command, env=environment())
    wait_until(received.exists, 100, "stage")
    supervisor.send_signal(signal.SIGINT)
    supervisor.wait(120)
    assert received.read_text() == "SIGTERM "

"""The display of a run in a real terminal: fits its width, draws nothing twice, and needs no
terminal either.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flows.workspace import display_path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("terminal_run.py")
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A tmux server of its own with one window, in which the scripted run goes on."""

    def __init__(self, folder: Path, socket: Path, columns: int, rows: int) -> None:
        self.folder, self.socket = folder, socket
        environment = {
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C.UTF-8",
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
        }
        command = f"cd {folder} && {sys.executable} {SCRIPT} {folder}; sleep 1000"
        size = ("-x", str(columns), "-y", str(rows))
        self.tmux("-f", "/dev/null", "new-session", "-d", *size, command, environment=environment)

    def tmux(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        command = ["tmux", "-u", "-S", str(self.socket), *arguments]
        answer = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=30
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def step(self, number: int) -> None:
        """Let the script go on."""
        (self.folder / f"step-{number}").touch()

    def history(self) -> list[str]:
        """Return all lines that were ever on the screen, the present ones last."""
        return self.tmux("capture-pane", "-p", "-S", "-").rstrip("\n").splitlines()

    def wait_for(self, text: str) -> list[str]:
        """Return the screen as soon as it holds ``text``."""
        deadline = time.monotonic() + 60
        while True:
            lines = self.history()
            if any(text in line for line in lines):
                return lines
            assert time.monotonic() < deadline, f"{text!r} never appeared:\n" + "\n".join(lines)
            time.sleep(0.05)


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    with TemporaryDirectory() as folder:  # the path of a socket must be short
        opened = Terminal(tmp_path, Path(folder) / "tmux", *request.param)
        yield opened
        opened.tmux("kill-server")


@needs_tmux
@pytest.mark.parametrize("terminal", [(120, 40)], indirect=True)
def test_a_terminal_that_becomes_narrower_shows_each_stage_once(terminal: Terminal) -> None:
    terminal.step(0)
    terminal.wait_for("job of")
    terminal.tmux("resize-window", "-x", "60", "-y", "24")
    terminal.step(1)
    lines = terminal.wait_for("45/90")
    assert len(rows_of("sft", lines)) == len(rows_of("ppo", lines)) == 1


def rows_of(stage: str, lines: list[str]) -> list[str]:
    return [line for line in lines if line[2:].startswith(f"{stage} ")]


@needs_tmux
@pytest.mark.parametrize(
    "terminal", [(40, 20), (80, 24), (120, 40)], indirect=True, ids=["40x20", "80x24", "120x40"]
)
def test_a_run_fits_the_terminal_and_no_line_is_drawn_twice(
    terminal: Terminal, request: pytest.FixtureRequest
) -> None:
    columns = int(request.node.callspec.id.partition("x")[0])
    frames = [terminal.wait_for("starting Prefect")]
    terminal.step(0)
    frames.append(terminal.wait_for("job of"))
    terminal.step(1)
    frames.append(terminal.wait_for("45/90"))
    terminal.step(2)
    frames.append(terminal.wait_for("34/640"))
    terminal.step(3)
    terminal.step(4)
    frames.append(terminal.wait_for("the end"))
    (terminal.folder / "frames.txt").write_text("\n\n".join("\n".join(frame) for frame in frames))
    for frame in frames:
        assert max(map(len, frame)) <= columns
        for stage in ("collect", "sft", "gate-reward", "ppo"):
            assert len(rows_of(stage, frame)) <= 1, frame
    assert len(rows_of("ppo", frames[-1])) == 1 and len(rows_of("sft", frames[-1])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_output_that_is_no_terminal_has_no_control_codes(tmp_path: Path, term: str) -> None:
    for number in range(5):
        (tmp_path / f"step-{number}").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": term, "FORCE_COLOR": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert "\x1b" not in answer.stdout and "\r" not in answer.stdout
    lines = [line.partition("] ")[2] or line for line in answer.stdout.splitlines()]
    assert "starting Prefect" in lines and "ppo          ran        99.0 s" in lines
    assert "verdict     not shown better than champion version 3" in lines
    assert lines[-2:] == [
        f"next        rlhf chat models/policy --workspace {display_path(tmp_path)}   (talk to the new policy)",
        "the end",
    ]

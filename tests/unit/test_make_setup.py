"""``make setup`` names each step and lets pip show its progress; ``make run`` tells a gate's no
from an error.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from lock_files import ROOT, hashes, pins

# Answers like Python, makes a venv of a copy of itself, and prints how pip is called.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c "*) exit 0 ;;
  "--version "*) echo "Python 3.x" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "called: $*" ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not on PATH")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-torch.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make_setup(checkout: Path, stdout: int) -> bytes:
    command = ["make", "--no-print-directory", "setup", "PYTHON=./python"]
    return subprocess.run(command, cwd=checkout, stdout=stdout, check=True, timeout=60).stdout


def test_each_step_is_named_before_it_runs_and_done_once(checkout: Path) -> None:
    lines = make_setup(checkout, subprocess.PIPE).decode().splitlines()
    begins = (
        "1/3 creating .venv with Python 3.x",
        "called",
        "2/3 installing the ",
        "called",
        "called",
        "3/3 installing",
        "called",
    )
    assert all(map(str.startswith, lines, (*begins, "ready; next: source .venv/bin/activate")))
    count = len(pins("requirements.lock"))
    assert f" {count} packages" in lines[2] and "--editable ." in lines[6]
    assert (
        "--require-hashes -r requirements.lock" in lines[3]
        and "-r requirements-torch.lock" in lines[4]
    )
    calls = [line for line in lines if line.startswith("called")]
    assert len(lines) == 8 and all("--quiet" in line for line in calls)
    assert b"called" not in make_setup(checkout, subprocess.PIPE)


def test_on_a_terminal_pip_is_not_silenced(checkout: Path) -> None:
    controller, terminal = pty.openpty()
    try:
        make_setup(checkout, terminal)
        os.close(terminal)
        output = b""
        while True:
            try:
                chunk = os.read(controller, 4096)
            except OSError:  # the terminal is closed and everything is read
                break
            if not chunk:
                break
            output += chunk
    finally:
        os.close(controller)
    assert output.count(b"called: -m pip install") == 4 and b"--quiet" not in output


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 0), (1, 2), (2, 2), (4, 2)])
def test_a_gate_that_said_no_is_no_error_of_make(checkout: Path, code: int, status: int) -> None:
    make_setup(checkout, subprocess.DEVNULL)
    program = checkout / ".venv" / "bin" / "rlhf"
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    command = ["make", "--no-print-directory", "run", "PYTHON=./python"]
    ended = subprocess.run(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
    )
    assert ended.returncode == status
    lines = ended.stdout.decode().splitlines()
    assert [line for line in lines if "gate said no" in line] == (lines[-1:] if code == 3 else [])


HASHED = sorted(
    {*ROOT.glob("requirements*.lock"), *ROOT.glob("infra/docker/*.lock")}
    - {ROOT / "requirements-torch.lock"}
)


@pytest.mark.parametrize("lock", HASHED, ids=lambda path: str(path.name))
def test_every_package_of_a_lock_has_hashes(lock: Path) -> None:
    name = str(lock.relative_to(ROOT))
    assert pins(name).keys() == hashes(name).keys()
    assert all(
        re.fullmatch("[0-9a-f]{64}", digest)
        for digests in hashes(name).values()
        for digest in digests
    )


def test_pip_takes_nothing_of_a_lock_without_its_hash() -> None:
    recipes = (ROOT / "Makefile").read_text() + (
        ROOT / "infra" / "docker" / "Dockerfile"
    ).read_text()
    hashed = [
        line
        for line in recipes.splitlines()
        if re.search(r"(-r|--requirement) \S*requirements(?!-torch)", line)
    ]
    assert len(hashed) == 6
    assert all("--require-hashes" in line or "hashed_install" in line for line in hashed)

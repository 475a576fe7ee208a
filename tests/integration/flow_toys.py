"""Small workspaces whose stages are shell commands, and helpers to run `rlhf` in them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest

from flows.cli import main

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import pathlib, subprocess, sys, time
work = pathlib.Path("work/ppo"); work.mkdir(parents=True, exist_ok=True)
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
saved = work / "step"
start = int(saved.read_text()) if saved.exists() else 0
with open("starts.log", "a") as log: log.write(f"{start}\\n")
for step in range(start, int(sys.argv[1])):
    time.sleep(0.3)
    (work / "part").write_text(str(step + 1)); (work / "part").replace(saved)
    print(f"ppo: {step + 1}/{sys.argv[1]}", flush=True)
rank.kill(); rank.wait()
pathlib.Path("policy.txt").write_text("done")
"""


def environment(**extra: str) -> dict[str, str]:
    """Return an environment with this interpreter and source tree, and without settings of Prefect,
    MLflow or rlhf.
    """
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RLHF_", "MLFLOW_"))
    }
    source = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "PYTHONPATH": source, **extra}


def make_toy(
    folder: Path, dvc_yaml: str, params: str = "seed: 1\n", prefect_database: Path | None = None
) -> Path:
    """Create a workspace with the given pipeline.

    With ``prefect_database`` it is one that has been used before: it is a DVC root, and it has a
    copy of that database.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if prefect_database is not None:
        for name in (".dvc", ".rlhf/prefect"):
            (folder / name).mkdir(parents=True)
        (folder / ".dvc" / "config").write_text(
            "[core]\n    no_scm = True\n    analytics = false\n"
        )
        shutil.copy(prefect_database, folder / ".rlhf" / "prefect" / "prefect.db")
    (folder / "params.yaml").write_text(params)
    (folder / "dvc.yaml").write_text(dvc_yaml)
    (folder / "train.py").write_text(TRAIN)
    return folder


def rlhf(
    *arguments: str, cwd: Path, timeout: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run an `rlhf` command to its end."""
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout
    )


@dataclass(frozen=True)
class CommandLine:
    """The command line of `rlhf` in this process, for what is refused before anything starts: no
    second interpreter.
    """

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in ``cwd`` and return its exit code and output."""
        self.monkeypatch.chdir(cwd)
        self.monkeypatch.setattr(sys, "argv", ["rlhf", *arguments])
        before = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            with mock.patch.dict(os.environ):
                main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(arguments, code, *self.capsys.readouterr())


def begin(*arguments: str, cwd: Path, **env: str) -> subprocess.Popen[bytes]:
    """Start an `rlhf` command as a shell's `&` does, with SIGINT ignored. Output goes to
    out.log.
    """
    quoted = " ".join([sys.executable, "-m", "flows.cli", *arguments])
    with (cwd / "out.log").open("wb") as log:
        return subprocess.Popen(
            ["sh", "-c", f"trap '' INT; exec {quoted}"],
            cwd=cwd,
            env=environment(**env),
            stdout=log,
            stderr=log,
        )


def processes_of(workspace: Path) -> list[psutil.Process]:
    """Return every live process that ``rlhf`` has started for ``workspace``."""
    processes = []
    for process in psutil.process_iter():
        try:
            owner = process.environ().get("RLHF_OWNER")
            if owner == str(workspace) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def find_process(workspace: Path, *parts: str) -> psutil.Process:
    """Return the newest process of ``workspace``, supervisors excepted, whose command line contains
    all ``parts``.
    """
    matching = []
    for process in processes_of(workspace):
        line = " ".join(process.cmdline())
        if "flows.supervision.supervisor" not in line and all(part in line for part in parts):
            matching.append(process)
    assert matching, f"no process with {parts}"
    return max(matching, key=lambda process: process.create_time())

"""A disk that is full, files that may not grow and memory that may not: real trainings end in one
line, leave nothing half-written, and end later with the results of one that was left alone.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks import exit_code_of
from small_disk import small_disk
from unit.training.four_stages import OUTPUTS, results, train

from rlhf_core.errors import EXIT_USER_ERROR, RlhfError
from rlhf_core.stages.runtime import runner

STAGES = ("reward", "ppo")
# Of what a training needs on its disk: it ends in other places.
SHARES = (0.02, 0.2, 0.4, 0.6, 0.8, 0.95)
MIB = 2**20


@pytest.fixture(scope="module")
def whole(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the stages leave that met no fault, and the bytes that they need."""
    left: dict[str, Any] = {}
    for name in STAGES:
        out = tmp_path_factory.mktemp("undisturbed") / name
        expected = results(name, out, train(name, workspace, out))
        left[name] = expected, sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return left


def run_as_a_stage(name: str, root: Path, out: Path) -> Any:
    """Train under the stage's own runner, which says how it ended."""
    original = runner._run
    runner._run = lambda *_: train(name, root, out)
    try:
        return runner.run_stage(name, out)
    finally:
        runner._run = original


def require_nothing_half_written(name: str, out: Path) -> None:
    parts = [path for path in out.rglob("*") if path.name.endswith(".part") or ".old-" in path.name]
    assert not parts and not (out / OUTPUTS[name]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_a_disk_that_is_full_anywhere_in_a_training(
    name: str, workspace: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    expected, needed = whole[name]
    out, refusals = tmp_path / "out", 0
    with small_disk(out, 16384):
        for share in SHARES:
            size = f"remount,size={int(share * needed) + 16384}"
            subprocess.run(["mount", "-o", size, str(out)], check=True)
            try:
                metrics = run_as_a_stage(name, workspace, out)
            except RlhfError as error:
                said = str(error)
            else:
                break  # what was made before is not made again, and may be smaller than it was
            require_told(said, out)
            require_nothing_half_written(name, out)
            refusals += 1
        else:
            subprocess.run(["mount", "-o", f"remount,size={8 * needed}", str(out)], check=True)
            metrics = run_as_a_stage(name, workspace, out)
        assert refusals > 2 and results(name, out, metrics) == expected


def require_told(said: str, out: Path) -> None:
    """Check that one line names what could not be written, and says what to do."""
    assert "\n" not in said and str(out) in said and "make room" in said, said
    assert re.search("no space left|file too large", said, re.IGNORECASE), said


def train_within(limit: int, kind: str, name: str, root: Path, out: Path) -> None:
    """Train under a limit of this process, and leave the line with which it ended."""
    number = {
        "memory": resource.RLIMIT_AS,
        "file": resource.RLIMIT_FSIZE,
        "open files": resource.RLIMIT_NOFILE,
    }[kind]
    held = 0
    if kind == "memory":
        status = Path("/proc/self/status").read_text()
        match = re.search(r"VmSize:\s+(\d+) kB", status)
        assert match is not None
        held = int(match[1]) * 1024
    elif kind == "open files":
        held = max(map(int, os.listdir("/proc/self/fd")))
    _, hard = resource.getrlimit(number)
    resource.setrlimit(number, (held + limit, hard))
    said, code = "", 0
    try:
        run_as_a_stage(name, root, out)
    except RlhfError as error:
        said, code = str(error), error.exit_code
    resource.setrlimit(number, (hard, hard))
    (out / "said.txt").write_text(said)
    raise SystemExit(code)


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("memory", (0, 12 * MIB, 32 * MIB)),
        ("file", (0, 512, 8192)),
        ("open files", (0, 1, 2, 3)),
    ],
)
def test_a_limit_of_the_process_loses_nothing(
    name: str,
    kind: str,
    limits: tuple[int, ...],
    workspace: Path,
    whole: dict[str, Any],
    tmp_path: Path,
) -> None:
    out, refusals = tmp_path / "out", 0
    out.mkdir()
    for limit in limits:
        code = exit_code_of(train_within, limit, kind, name, workspace, out)
        if not code:
            break
        require_nothing_half_written(name, out)
        refusals += 1
        if kind == "memory" and code == -signal.SIGABRT:
            continue  # code in Rust ends the process where an allocation of its own fails
        assert code == EXIT_USER_ERROR
        said = (out / "said.txt").read_text()
        if kind == "memory":
            assert "\n" not in said and "main memory is used up" in said, said
        elif kind == "open files":
            assert "\n" not in said and "raise the limit of open files" in said, said
        else:
            require_told(said, out)
    assert refusals
    metrics = run_as_a_stage(name, workspace, out)
    assert results(name, out, metrics) == whole[name][0]

"""Unchanged stages are not run again, and a clone is restored from a DVC remote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import SmokeRun, run

pytestmark = pytest.mark.services


def ran(output: str) -> list[str]:
    """Stages that a `dvc repro` ran."""
    return re.findall(r"Running stage '([\w-]+)'", output)


def repro(workspace: Path, *arguments: str) -> str:
    done = run("dvc", "repro", *arguments, cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def set_line(workspace: Path, old: str, new: str) -> None:
    path = workspace / "params.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.slow
def test_a_change_concerns_what_reads_it_alone(smoke_copy: Path) -> None:
    set_line(smoke_copy, "title: RLHF pipeline report", "title: Another title")
    assert ran(repro(smoke_copy)) == ["report"]
    assert "Another title" in (smoke_copy / "report.html").read_text()
    # A changed bound runs the gate and what follows, but trains nothing.
    set_line(smoke_copy, "at_least: 0.05", "at_least: 0.06")
    assert set(ran(repro(smoke_copy))) <= {"gate-reward", "report"}
    set_line(smoke_copy, "value_clip: 0.2", "value_clip: 0.3")
    assert ran(repro(smoke_copy, "--dry"))[0] == "ppo"


@pytest.mark.slow
def test_a_clone_is_restored_from_a_remote(smoke_copy: Path, tmp_path: Path) -> None:
    remote, clone = tmp_path / "remote", tmp_path / "clone"
    for command in (
        ("dvc", "remote", "add", "--default", "store", str(remote)),
        ("dvc", "push", "--quiet"),
        ("git", "init", "--quiet"),
        ("git", "add", "params.yaml", "dvc.yaml", "dvc.lock", ".dvc/config", ".dvcignore", ".fingerprints"),
        ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "-m", "run"),
        ("git", "clone", "--quiet", str(smoke_copy), str(clone)),
    ):
        done = run(*command, cwd=smoke_copy)
        assert done.returncode == 0, done.stderr
    pulled = run("dvc", "pull", "--quiet", "--allow-missing", cwd=clone)
    assert pulled.returncode == 0, pulled.stderr
    for name in ("models/policy/model.safetensors", "metrics/evaluation.json", "report.html"):
        assert (clone / name).read_bytes() == (smoke_copy / name).read_bytes()
    assert ran(repro(clone)) == []


def test_smoke_left_no_partial_state(smoke: SmokeRun) -> None:
    assert not list((smoke.workspace / "work").glob("*/*"))

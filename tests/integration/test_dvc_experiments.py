"""DVC's own commands for experiments on a finished run: one changed line, tables that fit, curves of both runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from commands import ROOT, run

pytestmark = [pytest.mark.services, pytest.mark.slow]


def output(*words: str, cwd: Path) -> str:
    """What a command that must succeed prints."""
    done = run(*words, cwd=cwd, RLHF_TRACKING="off", GIT_CONFIG_GLOBAL="/dev/null")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def repository(smoke_copy: Path) -> Path:
    """A git repository with the finished smoke run, as after `git init` and `rlhf init` in one folder."""
    shutil.copy(ROOT / ".gitignore", smoke_copy / ".gitignore")
    (smoke_copy / ".dvc" / ".gitignore").write_text("/config.local\n/tmp\n/cache\n")
    output("git", "init", "--quiet", cwd=smoke_copy)
    output("dvc", "config", "--unset", "core.no_scm", cwd=smoke_copy)
    for key, value in (("user.name", "t"), ("user.email", "t@example.org")):
        output("git", "config", key, value, cwd=smoke_copy)
    output("git", "add", "--all", cwd=smoke_copy)
    output("git", "commit", "--quiet", "--message", "run", cwd=smoke_copy)
    return smoke_copy


def test_an_experiment_is_run_shown_and_compared(repository: Path) -> None:
    output("dvc", "exp", "run", "--quiet", "--name", "second", "--set-param", "report.title=Second", cwd=repository)
    changed = output("git", "diff", "--unified=0", "params.yaml", cwd=repository).splitlines()[4:]
    assert [line.split() for line in changed[1:]] == [
        ["-", "title:", "RLHF", "pipeline", "report"],
        ["+", "title:", "Second"],
    ]
    shown = output("dvc", "exp", "show", "--only-changed", cwd=repository)
    assert "[second]" in shown and "report.title" in shown and max(map(len, shown.splitlines())) <= 80
    metrics = output("dvc", "metrics", "show", cwd=repository).splitlines()
    assert "win_rate_low95" in metrics[0] and max(map(len, metrics)) <= 120 and len(metrics) == 2
    output("dvc", "plots", "diff", cwd=repository)
    page = (repository / "dvc_plots" / "index.html").read_text()
    for title in ("SFT loss", "Accuracy of reward model, referee and judge", "PPO reward", "PPO KL from SFT"):
        assert title in page
    assert output("git", "status", "--porcelain", cwd=repository).split() == ["M", "dvc.lock", "M", "params.yaml"]


def test_an_experiment_in_a_folder_of_its_own_finds_what_the_workspace_has_done(repository: Path) -> None:
    ran = output("dvc", "exp", "run", "--temp", "--name", "third", "-S", "report.title=Third", cwd=repository)
    assert re.findall(r"Running stage '([\w-]+)'", ran) == ["report"]
    assert "third" in output("dvc", "exp", "list", cwd=repository)

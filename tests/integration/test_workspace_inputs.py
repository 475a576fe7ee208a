"""What DVC sees of the inputs of a workspace: changed data is never reported as up to date."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from integration.flow_toys import environment, rlhf

from flows.commands.init import initialise
from flows.commands.status import stages_status
from flows.commands.text import last_lines
from flows.dvc_repo.inputs import refresh_inputs, with_sources
from flows.dvc_repo.recipe import trial_workspace
from flows.dvc_repo.root import ensure_dvc
from rlhf_core.config.loading import load_params
from rlhf_core.errors import RlhfError
from rlhf_core.tracking.stage_run import tracking_uri

pytestmark = pytest.mark.services
ROWS = [f'{{"prompt": "p{n}", "chosen": "a{n}", "rejected": "b{n}"}}\n' for n in range(40)]


def dvc(workspace: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dvc", *words]
    return subprocess.run(command, cwd=workspace, env=environment(), capture_output=True, text=True)


def make(folder: Path, *sets: str, profile: str | None = "smoke") -> Path:
    return initialise(folder, profile, ["collect.source=files", *sets])


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for name in ("pairs.jsonl", "more/a.jsonl"):
        (tmp_path / name).write_text("".join(ROWS))
    return tmp_path


@pytest.mark.slow
def test_a_changed_new_or_lost_source_file_is_seen_by_dvc_and_by_status(files: Path) -> None:
    workspace = make(files / "run", 'collect.files.preferences=["pairs.jsonl","more/*.jsonl"]')
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    refresh_inputs(workspace)
    done = dvc(workspace, "repro", "-s", "collect")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(dvc(workspace, "status", "--json", "collect").stdout) == {}
    for name, text in (
        ("pairs.jsonl", "".join(ROWS[:20])),
        ("more/a.jsonl", ROWS[0]),
        ("more/b.jsonl", ROWS[1]),
    ):
        path = files / name
        path.write_text(text)
        seen = dvc(workspace, "status", "collect").stdout
        assert "modified" in seen and path.parent.name in seen, path
        (line,) = [line for line in stages_status(workspace).lines if line.startswith("collect")]
        assert "stale" in line
        assert "Running stage 'collect'" in dvc(workspace, "repro", "-s", "collect").stdout
        assert json.loads(dvc(workspace, "status", "--json", "collect").stdout) == {}, (
            "sources.txt was not refreshed"
        )


@pytest.mark.slow
def test_a_file_under_dvc_add_leads_to_collect_and_dag_has_no_fingerprints(files: Path) -> None:
    workspace = make(files / "run")
    (workspace / "pairs.jsonl").write_text("".join(ROWS))
    text = (workspace / "params.yaml").read_text()
    (workspace / "params.yaml").write_text(
        text.replace("preferences: []", "preferences: [pairs.jsonl]")
    )
    assert load_params(workspace).collect.files.preferences
    assert dvc(workspace, "add", "-q", "pairs.jsonl").returncode == 0
    refresh_inputs(workspace)
    edges = dvc(workspace, "dag", "--dot").stdout
    assert '"pairs.jsonl.dvc" -> "collect"' in edges and "fingerprint" not in edges


@pytest.mark.slow
def test_an_edited_suite_of_expectations_is_seen_by_dvc_and_by_status(files: Path) -> None:
    small = ["collect.world.preferences=400", "collect.world.demonstrations=400"]
    workspace = initialise(files / "run", "smoke", small)
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    refresh_inputs(workspace)
    done = dvc(workspace, "repro", "-s", "collect", "validate")
    assert done.returncode == 0, done.stdout + done.stderr
    refresh_inputs(workspace)
    assert json.loads(dvc(workspace, "status", "--json", "validate").stdout) == {}
    suite = workspace / "expectations" / "preferences.json"
    document = json.loads(suite.read_text())
    document["expectations"].pop()
    suite.write_text(json.dumps(document))
    assert "expectations" in dvc(workspace, "status", "validate").stdout
    (line,) = [line for line in stages_status(workspace).lines if line.startswith("validate")]
    assert "stale" in line


@pytest.mark.slow
def test_a_recipe_keeps_its_text_but_for_the_files(files: Path) -> None:
    workspace = make(files / "run", 'collect.files.preferences=["pairs.jsonl"]')
    lines = (workspace / "dvc.yaml").read_text().splitlines()
    assert [line for line in lines if "pairs.jsonl" in line] == [
        "    deps: [.fingerprints/collect.txt, .fingerprints/sources.txt, ../pairs.jsonl]"
    ]
    text = "\n".join(lines) + "\n"
    assert with_sources(text, load_params(workspace), workspace) == text
    trial = trial_workspace(workspace, None, ["seed=2"])
    assert "../../../pairs.jsonl]" in (trial / "dvc.yaml").read_text()
    assert trial.name.startswith("smoke-"), "the trial is one of the workspace's profile"
    assert tracking_uri(trial) == tracking_uri(workspace) == f"sqlite:///{workspace}/mlflow.db"


def test_an_experiment_of_dvc_is_recorded_where_it_was_started(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = files / "run" / ".dvc" / "tmp" / "exps" / "tmp1" / "sub"
    (temporary.parent / ".dvc").mkdir(parents=True)
    temporary.mkdir()
    assert tracking_uri(temporary) == f"sqlite:///{temporary}/mlflow.db"
    monkeypatch.setenv("DVC_ROOT", str(files / "run"))
    assert tracking_uri(temporary) == f"sqlite:///{files}/run/sub/mlflow.db"
    assert tracking_uri(files / "elsewhere") == f"sqlite:///{files}/elsewhere/mlflow.db"


def git(folder: Path, *words: str) -> str:
    """The output of a git command by somebody."""
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", *who, *words]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize("commits", ["all", "a file", "all, cloned"])
def test_git_that_came_after_init_is_noticed_without_a_change_of_what_is_committed(
    tmp_path: Path, commits: str
) -> None:
    workspace = tmp_path / "run"
    config = workspace / ".dvc" / "config"
    workspace.mkdir()
    ensure_dvc(workspace)
    written = config.read_text()
    assert "no_scm" in written
    git(workspace, "init", "-q")
    git(workspace, "add", ".dvcignore" if commits == "a file" else ".")
    git(workspace, "commit", "-q", "-m", "recipe")
    if commits == "all, cloned":
        git(tmp_path, "clone", "-q", "run", "clone")
        workspace = tmp_path / "clone"
        config = workspace / ".dvc" / "config"
    for _ in range(2):
        ensure_dvc(workspace)
        experiments = dvc(workspace, "exp", "list")
        assert experiments.returncode == 0, experiments.stderr
    assert not git(workspace, "status", "--porcelain", "--untracked-files=no")
    assert (config.read_text() == written) == (commits != "a file")
    # A copy of it outside of git is left by git again.
    away = tmp_path / "away"
    shutil.copytree(workspace, away, ignore=shutil.ignore_patterns(".git"))
    ensure_dvc(away)
    status = dvc(away, "status")
    assert status.returncode == 0, status.stderr


@pytest.mark.slow
def test_git_that_came_after_init_is_noticed_and_everything_is_ignored_from_the_start(
    files: Path,
) -> None:
    workspace = make(files / "run", profile="smoke")
    assert "no_scm" in (workspace / ".dvc" / "config").read_text()
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    for name in (
        "models/policy/weights",
        "data/raw/x",
        "work/ppo/x",
        ".dvc/tmp/x",
        ".dvc/cache/x",
        "mlflow.db",
    ):
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text("x")
    ensure_dvc(workspace)
    assert "no_scm" not in (workspace / ".dvc" / "config").read_text()
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=workspace,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    suites = {
        f"expectations/{name}.json"
        for name in ("preferences", "demonstrations", "prompts", "pretrain")
    }
    recipe = {"dvc.yaml", "params.yaml"} | suites
    assert set(listed) == {".dvc/.gitignore", ".dvc/config", ".dvcignore", ".gitignore"} | recipe
    moved = workspace.with_name("moved")
    shutil.copytree(workspace, moved, ignore=shutil.ignore_patterns(".git"))
    assert "not a git repository" in dvc(moved, "status").stderr
    assert rlhf("status", cwd=moved).stdout.count("not run yet") > 10, (
        "a copy out of git is a workspace too"
    )


@pytest.mark.slow
def test_a_run_that_cannot_succeed_is_refused_before_anything_starts(files: Path) -> None:
    workspace = make(
        files / "run",
        'collect.files.preferences=["gone.jsonl"]',
        'collect.files.prompts=["lost.txt"]',
    )
    answer = rlhf("run", cwd=workspace)
    assert answer.returncode == 2, answer.stderr
    assert [
        line.count(name)
        for line, name in zip(answer.stderr.splitlines(), ("gone", "lost"), strict=True)
    ] == [1, 1]
    assert not (workspace / ".rlhf" / "logs" / "server.log").exists()


@pytest.mark.slow
def test_data_and_model_are_short_for_their_settings_and_logs_name_what_there_is(
    files: Path,
) -> None:
    replies = [
        f'"chosen": "{"a" * (3 + n % 5)}", "rejected": "{"b" * (3 + n % 3)}"' for n in range(800)
    ]
    (files / "pairs.jsonl").write_text(
        "".join(f'{{"prompt": "p{n}", {both}}}\n' for n, both in enumerate(replies))
    )
    made = rlhf(
        "init",
        "run",
        "--data",
        "pairs.jsonl",
        "--data",
        "more/a.jsonl",
        "--model",
        "me/model",
        cwd=files,
    )
    assert made.returncode == 0, made.stderr
    params = load_params(files / "run")
    assert params.base.source == "me/model" and params.collect.source == "files"
    assert [str(path) for path in params.collect.files.paths()] == [
        "../pairs.jsonl",
        "../more/a.jsonl",
    ]
    done = dvc(files / "run", "repro", "-s", "collect")
    assert done.returncode == 0, (
        "what rlhf init makes, dvc reproduces at once: " + done.stdout + done.stderr
    )
    (files / "run" / ".rlhf" / "logs").mkdir(parents=True)
    (files / "run" / ".rlhf" / "logs" / "ppo.log").write_text("one\ntwo\nthree\n")
    assert last_lines(files / "run", "ppo", 2) == "two\nthree"
    with pytest.raises(RlhfError, match="no log of sft; there are ppo"):
        last_lines(files / "run", "sft", 2)

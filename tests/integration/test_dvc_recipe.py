"""A finished run under DVC: unchanged stages, a clone from a remote, and DVC's own commands for
experiments.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from commands import ROOT, SmokeRun, run
from mlflow import MlflowClient

from rlhf_core.tracking.pipeline_run import HEADLINE, headline_results

COMMAND_SECONDS = 1800  # of a command of DVC that runs a stage; seconds on an idle machine


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


@pytest.mark.services
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


@pytest.mark.services
@pytest.mark.slow
def test_a_clone_is_restored_from_a_remote(smoke_copy: Path, tmp_path: Path) -> None:
    remote, clone = tmp_path / "remote", tmp_path / "clone"
    for command in (
        ("dvc", "remote", "add", "--default", "store", str(remote)),
        ("dvc", "push", "--quiet"),
        ("git", "init", "--quiet"),
        (
            "git",
            "add",
            "params.yaml",
            "dvc.yaml",
            "dvc.lock",
            ".dvc/config",
            ".dvcignore",
            ".fingerprints",
            "expectations",
        ),
        (
            "git",
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@example.org",
            "commit",
            "--quiet",
            "-m",
            "run",
        ),
        ("git", "clone", "--quiet", str(smoke_copy), str(clone)),
    ):
        done = run(*command, cwd=smoke_copy)
        assert done.returncode == 0, done.stderr
    pulled = run("dvc", "pull", "--quiet", "--allow-missing", cwd=clone)
    assert pulled.returncode == 0, pulled.stderr
    for name in ("models/policy/model.safetensors", "metrics/evaluation.json", "report.html"):
        assert (clone / name).read_bytes() == (smoke_copy / name).read_bytes()
    assert ran(repro(clone)) == []


@pytest.mark.services
def test_smoke_left_no_partial_state(smoke: SmokeRun) -> None:
    assert not list((smoke.workspace / "work").glob("*/*"))


def output(*words: str, cwd: Path, tracking: str = "off") -> str:
    """What a command that must succeed prints."""
    environment = {"RLHF_TRACKING": tracking, "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = run(*words, cwd=cwd, timeout=COMMAND_SECONDS, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def repository(smoke_copy: Path) -> Path:
    """A git repository with the finished smoke run, as after `git init` and `rlhf init` in one
    folder.
    """
    shutil.copy(ROOT / ".gitignore", smoke_copy / ".gitignore")
    (smoke_copy / ".dvc" / ".gitignore").write_text("/config.local\n/tmp\n/cache\n")
    output("git", "init", "--quiet", cwd=smoke_copy)
    output("dvc", "config", "--unset", "core.no_scm", cwd=smoke_copy)
    for key, value in (("user.name", "t"), ("user.email", "t@example.org")):
        output("git", "config", key, value, cwd=smoke_copy)
    output("git", "add", "--all", cwd=smoke_copy)
    output("git", "commit", "--quiet", "--message", "run", cwd=smoke_copy)
    return smoke_copy


@pytest.mark.services
@pytest.mark.slow
def test_others_take_the_policy_as_a_version_or_follow_it(repository: Path, tmp_path: Path) -> None:
    output("dvc", "remote", "add", "--default", "store", str(tmp_path / "store"), cwd=repository)
    output("dvc", "push", "--quiet", cwd=repository)
    output("git", "commit", "--quiet", "--all", "--message", "remote", cwd=repository)
    output("git", "tag", "--annotate", "policy@v1.0.0", "--message", "first", cwd=repository)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    output("dvc", "artifacts", "get", str(repository), "policy", cwd=theirs)
    output("git", "init", "--quiet", cwd=theirs)
    output("dvc", "init", "--quiet", cwd=theirs)
    output("dvc", "import", str(repository), "models/policy", "--out", "followed", cwd=theirs)
    weights = "model.safetensors"
    own = (repository / "models" / "policy" / weights).read_bytes()
    assert (theirs / "policy" / weights).read_bytes() == own
    assert (theirs / "followed" / weights).read_bytes() == own


@pytest.mark.services
@pytest.mark.slow
def test_an_experiment_is_run_shown_and_compared(repository: Path) -> None:
    output(
        "dvc",
        "exp",
        "run",
        "--quiet",
        "--name",
        "second",
        "--set-param",
        "report.title=Second",
        cwd=repository,
    )
    changed = output("git", "diff", "--unified=0", "params.yaml", cwd=repository).splitlines()[4:]
    assert [" ".join(line.split()) for line in changed[1:]] == [
        "- title: RLHF pipeline report",
        "+ title: Second",
    ]
    shown = output("dvc", "exp", "show", "--only-changed", cwd=repository)
    assert (
        "[second]" in shown and "report.title" in shown and max(map(len, shown.splitlines())) <= 80
    )
    settings = output("dvc", "exp", "show", "--only-changed", "--drop", ".*/", cwd=repository)
    assert "report.title" in settings and "/" not in settings
    metrics = output("dvc", "metrics", "show", cwd=repository).splitlines()
    assert (
        "judge.win_rate_low95" in metrics[0] and max(map(len, metrics)) <= 120 and len(metrics) == 2
    )
    output("dvc", "plots", "diff", cwd=repository)
    page = (repository / "dvc_plots" / "index.html").read_text()
    for title in (
        "SFT loss",
        "Accuracy of reward model, referee and judge",
        "PPO reward",
        "PPO KL from SFT",
    ):
        assert title in page
    assert output("git", "status", "--porcelain", cwd=repository).split() == [
        "M",
        "dvc.lock",
        "M",
        "params.yaml",
    ]


TRIAL = """
import json, pathlib, sys
import yaml
ppo = yaml.safe_load(open("params.yaml"))["ppo"]
numbers = [float(ppo["kl"]["coefficient"]), float(ppo["optimizer"]["lr"]), ppo["mini_batch_size"]]
names = sys.argv[1:]
headline = {name: round(sum(numbers) / (7 + place), 4) for place, name in enumerate(names)}
for folder in ("metrics", "models"):
    pathlib.Path(folder).mkdir(exist_ok=True)
pathlib.Path("metrics/summary.json").write_text(json.dumps(headline))
for name in ("metrics/ppo.json", "metrics/evaluation.json", "models/policy"):
    pathlib.Path(name).write_text(json.dumps(numbers))
"""
SETTINGS = ("ppo.kl.coefficient=0.125", "ppo.optimizer.lr=0.00002", "ppo.mini_batch_size=8")
PAIRS = [name for name in HEADLINE if not name.startswith("checker")]
CHECKED = [name for name in HEADLINE if not name.startswith(("judge", "gold", "reward"))]


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.parametrize("names", [PAIRS, CHECKED], ids=["pairs", "checker"])
def test_trials_with_other_figures_fit_a_terminal(names: list[str], tmp_path: Path) -> None:
    """DVC shows a column for each figure, setting and file that differs."""
    own = {"kl": {"coefficient": 0.05}, "optimizer": {"lr": 1e-05}, "mini_batch_size": 32}
    (tmp_path / "params.yaml").write_text(json.dumps({"ppo": own}))
    (tmp_path / "trial.py").write_text(TRIAL)
    files = ["metrics/ppo.json", "metrics/evaluation.json", "models/policy"]
    command = f"{sys.executable} trial.py {' '.join(names)}"
    ppo = {"cmd": command, "params": ["ppo"], "outs": files, "metrics": ["metrics/summary.json"]}
    report = {"cmd": "touch report.html", "deps": files, "outs": ["report.html"]}
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": {"ppo": ppo, "report": report}}))
    output("git", "init", "--quiet", cwd=tmp_path)
    for key, value in (("user.name", "t"), ("user.email", "t@example.org")):
        output("git", "config", key, value, cwd=tmp_path)
    output("dvc", "init", "--quiet", cwd=tmp_path)
    output("dvc", "repro", "--quiet", cwd=tmp_path)
    output("git", "add", "--all", cwd=tmp_path)
    output("git", "commit", "--quiet", "--message", "recipe", cwd=tmp_path)
    guide = (ROOT / "docs" / "train.md").read_text()
    (recipe,) = re.findall(r"`(dvc exp show --only-changed [^`]+)`", guide)
    for count in (1, len(SETTINGS)):
        changed = [word for setting in SETTINGS[:count] for word in ("-S", setting)]
        trial = f"trial-of-{count}"
        output("dvc", "exp", "run", "--quiet", "-n", trial, *changed, cwd=tmp_path)
        shown = output(*shlex.split(recipe), cwd=tmp_path).splitlines()
        assert max(len(line.rstrip()) for line in shown) <= 120, shown[1]
        told = {setting.partition("=")[0] for setting in SETTINGS[:count]} | {"kl"}
        decides = "judge.win_rate" if names is PAIRS else "checker.policy"
        assert {*told, decides} <= set(shown[1].split()) and trial in "".join(shown)


@pytest.mark.services
@pytest.mark.slow
def test_an_experiment_in_a_folder_of_its_own_finds_what_the_workspace_has_done(
    repository: Path,
) -> None:
    ran = output(
        "dvc", "exp", "run", "--temp", "--name", "third", "-S", "report.title=Third", cwd=repository
    )
    assert re.findall(r"Running stage '([\w-]+)'", ran) == ["report"]
    assert "third" in output("dvc", "exp", "list", cwd=repository)


@pytest.mark.services
@pytest.mark.slow
def test_an_experiment_is_one_run_in_mlflow(repository: Path) -> None:
    """Named as the experiment, with the headline; also where DVC runs it in a folder of its own,
    which goes.
    """
    for name, options in (("here", ()), ("apart", ("--temp",))):
        setting = f"report.title={name}"
        words = ("dvc", "exp", "run", *options, "-n", name, "-S", setting)
        output(*words, cwd=repository, tracking="on")
    client = MlflowClient(f"sqlite:///{repository / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = client.search_runs(
        experiments, "tags.`rlhf.pipeline` = 'true' and tags.`rlhf.dvc_experiment` != ''"
    )
    folder = repository / "metrics"
    told = json.loads((folder / "summary.json").read_text())
    metrics = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    headline = headline_results(metrics, told)
    assert {run.info.run_name for run in runs} == {"here", "apart"}
    for parent in runs:
        assert parent.info.status == "FINISHED" and parent.data.metrics == pytest.approx(headline)
        below = client.search_runs(
            experiments, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
        )
        assert [child.data.tags["stage"] for child in below] == ["report"]

"""Locks, cleanup, the graph and the schedule: the parts of the flow that need no server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from background import wait_until
from integration.flow_toys import CommandLine, environment, make_toy, rlhf

from flows.cli import app
from flows.commands.run_state import busy_seconds
from flows.dvc_repo.graph import read_graph
from flows.dvc_repo.root import cache_of, dvc_settings, ensure_dvc, share_settings
from flows.jobs.transfer import describe_remote
from flows.stage import StageOutcome, StageSpec, run_stage
from flows.workspace import RUN_VARIABLE, cleanup, locked

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PIPELINE = """
stages:
  gate-a: {cmd: 'true', deps: [x.txt, y.txt], outs: [z.txt]}
  one: {cmd: echo 1 > x.txt, outs: [x.txt]}
  two: {cmd: echo 2 > y.txt, deps: [x.txt], outs: [y.txt]}
"""


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.mark.parametrize("command", ["run", "up"])
def test_a_second_holder_is_refused_in_one_line_with_pid_and_time(
    tmp_path: Path, command: str
) -> None:
    toy = make_toy(tmp_path, PIPELINE)
    with locked(toy):
        answer = rlhf(command, cwd=toy)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert f"pid {os.getpid()}" in answer.stderr and "since 2" in answer.stderr
    options = {option for parameter in COMMANDS[command].params for option in parameter.opts}
    advice = re.sub("`.*?`", "", answer.stderr)  # without the command of the holder
    assert set(re.findall(r"--[a-z-]+", advice)) <= options, "what is advised can be done"


def test_a_stage_whose_inputs_a_run_is_making_says_who_holds_the_workspace(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, PIPELINE)
    with locked(toy):
        answer = rlhf("stage", "sft", cwd=toy)
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1
    assert (
        "stage sft needs data/clean" in answer.stderr
        and f"(pid {os.getpid()}, since 2" in answer.stderr
    )


@pytest.mark.slow
def test_the_graph_is_dvcs_own(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, PIPELINE)
    ensure_dvc(toy)
    graph = read_graph(toy)
    assert list(graph) == ["one", "two", "gate-a"]
    assert graph["gate-a"].after == ("one", "two") and graph["one"].outputs == ("x.txt",)


@pytest.mark.slow
@pytest.mark.parametrize("in_git", [True, False])
def test_dvc_reads_the_settings_of_a_new_root(tmp_path: Path, in_git: bool) -> None:
    if in_git:
        subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    ensure_dvc(tmp_path)
    command = [sys.executable, "-m", "dvc", "config", "--list", "--project"]
    listed = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.split()
    settings = {"core.analytics=false", "core.check_update=false"}
    assert set(listed) == settings | (set() if in_git else {"core.no_scm=True"})


@pytest.mark.slow
def test_a_cache_under_a_name_beyond_ascii_is_shared(tmp_path: Path) -> None:
    clone, workspace = tmp_path / "wörk 中", tmp_path / "elsewhere"
    for folder in (clone, workspace):
        folder.mkdir()
    ensure_dvc(clone)
    ensure_dvc(workspace, cache_of(clone))
    assert cache_of(workspace) == cache_of(clone) == clone / ".dvc" / "cache"


def dvc(folder: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=folder, check=True, capture_output=True
    )


@pytest.fixture
def base_and_trial(tmp_path: Path) -> tuple[Path, Path]:
    base, trial = tmp_path / "base", tmp_path / "base" / "workspaces" / "trial"
    trial.mkdir(parents=True)
    for folder in (base, trial):
        ensure_dvc(folder)
    return base, trial


@pytest.mark.slow
def test_a_trial_has_the_remotes_and_links_of_its_base(base_and_trial: tuple[Path, Path]) -> None:
    base, trial = base_and_trial
    dvc(base, "remote", "add", "--default", "store", "../store")
    dvc(base, "remote", "add", "--local", "far", "ssh://host/far")
    dvc(base, "remote", "modify", "--local", "far", "password", "hidden")
    dvc(base, "config", "cache.type", "hardlink,symlink")
    (base / ".dvc" / "config.local").chmod(0o600)
    share_settings(base, trial)
    settings = dvc_settings(trial)
    assert describe_remote(trial, None) == {"name": "store", "url": str(base.parent / "store")}
    assert (
        settings["remote.far.password"] == "hidden" and settings["cache.type"] == "hardlink,symlink"
    )
    assert (trial / ".dvc" / "config.local").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_trial_that_was_interrupted_or_moved_uses_the_cache_of_its_base(
    base_and_trial: tuple[Path, Path],
) -> None:
    base, trial = base_and_trial
    assert cache_of(trial) != cache_of(base), "interrupted before it shared anything"
    dvc(trial, "remote", "add", "--local", "own", "/own")
    share_settings(base, trial)
    assert cache_of(trial) == cache_of(base) and dvc_settings(trial)["remote.own.url"] == "/own"
    assert (trial / ".dvc" / "config.local").stat().st_mode & 0o777 == 0o600, (
        "a remote of the user's own has passwords"
    )
    moved = base.rename(base.with_name("moved"))
    trial = moved / "workspaces" / "trial"
    share_settings(moved, trial)
    assert cache_of(trial) == cache_of(moved) == moved / ".dvc" / "cache" and not base.exists()


SHARED = """
stages:
  ppo: {cmd: wc -c < raw.txt > policy.txt, deps: [raw.txt], params: [seed], outs: [policy.txt]}
"""


@pytest.mark.slow
def test_equal_computations_of_two_workspaces_share_one_result(tmp_path: Path) -> None:
    actions = []
    for name in ("one", "two"):
        toy = make_toy(tmp_path / name, SHARED, f"seed: 1\nunread: {name}\n")
        (toy / "raw.txt").write_text("x")
        ensure_dvc(toy, tmp_path / "cache")
        actions.append(run_stage(StageSpec(toy, "ppo")).action)
    assert actions == ["ran", "cached"]


@pytest.mark.slow
def test_what_runs_always_or_has_no_inputs_is_never_shared(tmp_path: Path) -> None:
    toy = make_toy(
        tmp_path,
        "stages:\n  a: {cmd: date > a, outs: [a]}\n  b: {cmd: date > b, deps: [a], outs: [b]}\n",
    )
    ensure_dvc(toy)
    assert {name: node.shareable for name, node in read_graph(toy).items()} == {
        "a": False,
        "b": True,
    }


@pytest.mark.parametrize("place", [".", "my-run"])
def test_a_new_dvc_root_leaves_gits_index_to_the_user(tmp_path: Path, place: str) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    (tmp_path / "mine.txt").write_text("x")
    git("add", "mine.txt")
    workspace = tmp_path / place
    workspace.mkdir(exist_ok=True)
    ensure_dvc(workspace)
    assert (workspace / ".dvc" / "config").is_file() and git(
        "diff", "--cached", "--name-only"
    ) == "mine.txt\n"


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", '{"write": ', "{}"])
def test_a_killed_dvc_does_not_stop_the_next(tmp_path: Path, content: str) -> None:
    toy = make_toy(tmp_path, SHARED)
    (toy / "raw.txt").write_text("x")
    ensure_dvc(toy)
    locks = toy / ".dvc" / "tmp" / "rwlock"
    locks.write_text(content)
    (locks.parent / "lock").write_text(" 999999")
    assert bool(cleanup(toy)) == (content != "{}") and cleanup(toy) == []
    assert run_stage(StageSpec(toy, "ppo")).action == "ran"


@pytest.mark.parametrize("kind", ["write", "read"])
def test_locks_of_a_killed_dvc_that_nobody_reaped_are_released_and_others_stay(
    tmp_path: Path, kind: str
) -> None:
    dead = subprocess.Popen(["true"])  # not waited for: until then it is a zombie
    wait_until(
        lambda: psutil.Process(dead.pid).status() == psutil.STATUS_ZOMBIE, 60, "end of the process"
    )
    holders = [{"pid": pid, "cmd": "dvc repro"} for pid in (dead.pid, os.getpid())]
    locks = tmp_path / ".dvc" / "tmp" / "rwlock"
    locks.parent.mkdir(parents=True)
    paths = ["/raw.txt", "/model.txt"]
    table = {"write": dict(zip(paths, holders, strict=True)), "read": {"/raw.txt": holders}}
    locks.write_text(json.dumps({kind: table[kind]}))
    assert len(cleanup(tmp_path)) == 1 and cleanup(tmp_path) == []
    left = {"write": {"/model.txt": holders[1]}, "read": {"/raw.txt": holders[1:]}}
    assert json.loads(locks.read_text()) == {"write": {}, "read": {}} | {kind: left[kind]}
    dead.wait()


def test_a_killed_holder_is_waited_for_until_its_supervisors_have_ended(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, PIPELINE)
    code = (
        "import os, sys, pathlib, time; from flows.workspace import locked\n"
        "from flows.supervision.processes import start_supervised\n"
        f"toy = pathlib.Path({str(toy)!r})\n"
        'stubborn = \'import signal, time; signal.signal(15, signal.SIG_IGN); open("began", "w"); time.sleep(300)\'\n'
        "with locked(toy) as lock:\n"
        "    start_supervised([sys.executable, '-c', stubborn], name='x', cwd=toy, env=os.environ, log=toy / 'log',\n"
        "                     grace=2.0, inherited_descriptors=[lock])\n"
        "    time.sleep(300)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], env=environment())
    wait_until((toy / "began").exists, 100, "supervised process")
    holder.kill()
    holder.wait()
    waited: list[str] = []
    with locked(toy, on_wait=waited.append):
        running = [
            process
            for process in psutil.process_iter()
            if any("began" in word for word in _command(process))
        ]
        assert not running
    assert len(waited) == 1 and f"pid {holder.pid}" in waited[0]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("code", "expected"), [(1, True), (137, True), (75, False), (2, False), (3, False), (4, False)]
)
def test_only_crashes_are_tried_again(code: int, expected: bool) -> None:
    assert StageOutcome("s", "failed", code).retryable is expected


def test_busy_time_counts_overlaps_once() -> None:
    assert busy_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "--set", "nope.x=1"), "nope"),
        (("run", "--profile", "nope"), "nope"),
        (("run", "--workspace", "missing"), "rlhf init"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    tmp_path: Path, arguments: tuple[str, ...], expected: str, command_line: CommandLine
) -> None:
    answer = command_line(*arguments, cwd=make_toy(tmp_path, PIPELINE))
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1 and expected in answer.stderr


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_named_in_one_line(tmp_path: Path) -> None:
    answer = rlhf("run", cwd=make_toy(tmp_path, PIPELINE), PREFECT_API_URL="http://127.0.0.1:9/api")
    assert (
        answer.returncode == 2
        and answer.stderr.count("\n") == 1
        and "PREFECT_API_URL" in answer.stderr
    )


def test_the_environment_that_a_killed_worker_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living one has a process that prepares the run, and then becomes the engine."""
    from prefect.runner._workspace_starter import WorkspaceResolvingEngineCommandStarter

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, other = tmp_path / "own", tmp_path / "other"
    starters = {}
    for name, folder in (("dead", own), ("prepared", own), ("running", own), ("other", other)):
        folder.mkdir(exist_ok=True)
        starters[name] = WorkspaceResolvingEngineCommandStarter(workspace_root=folder)
        run_id = {RUN_VARIABLE: f"{name}-{os.getpid()}"}
        environment = {"HF_TOKEN": "secret"} | ({} if name == "prepared" else run_id)
        manifest = {"working_directory": str(folder), "environment": environment}
        starters[name]._manifest_path.write_text(json.dumps(manifest))
    read = ["tail", "-f", str(starters["prepared"]._manifest_path)]
    engine = {**os.environ, RUN_VARIABLE: f"running-{os.getpid()}"}
    living = [
        subprocess.Popen(read, stdout=subprocess.PIPE),
        subprocess.Popen(["tail", "-f", __file__], stdout=subprocess.PIPE, env=engine),
    ]
    try:
        for process in living:
            assert process.stdout is not None and process.stdout.read(1), "it has begun"
        (line,) = cleanup(own)
        assert "environment" in line and cleanup(own) == []
    finally:
        for process in living:
            process.kill()
            process.wait()
    left = [name for name, starter in starters.items() if starter._manifest_path.exists()]
    assert left == ["prepared", "running", "other"]
    for starter in starters.values():
        starter.close()

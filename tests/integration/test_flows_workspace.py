"""Locks, cleanup, the graph and the schedule: the parts of the flow that need no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from flow_toys import CommandLine, environment, make_toy, rlhf

from flows.commands.summary import busy_seconds
from flows.dvc_repo.graph import StageNode, read_graph
from flows.dvc_repo.root import cache_of, ensure_dvc
from flows.pipeline.schedule import Schedule
from flows.stage.outcome import Action, LoggedProgress, StageOutcome, last_progress
from flows.stage.run import StageSpec, run_stage
from flows.stage.stage_hash import stage_hash
from flows.supervision.processes import kill_leftover_processes
from flows.workspace.dvc_locks import release_dvc_locks
from flows.workspace.folder import find_workspace
from flows.workspace.lock import locked
from rlhf_core.errors import RlhfError

PIPELINE = """
stages:
  gate-a: {cmd: 'true', deps: [x.txt, y.txt], outs: [z.txt]}
  one: {cmd: echo 1 > x.txt, outs: [x.txt]}
  two: {cmd: echo 2 > y.txt, deps: [x.txt], outs: [y.txt]}
"""


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def outcome(stage: str, action: Action, code: int = 0) -> StageOutcome:
    return StageOutcome(stage, action, code, "", 0.0, 1.0, 1.0)


def test_a_second_holder_is_refused_in_one_line_with_pid_and_time(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, PIPELINE)
    with locked(toy):
        answer = rlhf("run", cwd=toy)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert f"pid {os.getpid()}" in answer.stderr and "since 2" in answer.stderr


def test_the_lock_is_free_again_after_its_block(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, PIPELINE)
    with locked(toy):
        pass
    with locked(toy):
        pass


def test_outside_a_workspace_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RlhfError, match="rlhf init"):
        find_workspace(tmp_path)


def test_the_graph_is_dvcs_own(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, PIPELINE)
    ensure_dvc(toy)
    graph = read_graph(toy)
    assert list(graph) == ["one", "two", "gate-a"]
    assert graph["gate-a"].after == ("one", "two") and graph["one"].outputs == ("x.txt",)


@pytest.mark.parametrize("in_git", [True, False])
def test_dvc_reads_the_settings_of_a_new_root(tmp_path: Path, in_git: bool) -> None:
    if in_git:
        subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    ensure_dvc(tmp_path)
    command = [sys.executable, "-m", "dvc", "config", "--list", "--project"]
    listed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    settings = {"core.analytics=false", "core.check_update=false"}
    assert set(listed) == settings | (set() if in_git else {"core.no_scm=True"})


def test_a_cache_under_a_name_beyond_ascii_is_shared(tmp_path: Path) -> None:
    clone, workspace = tmp_path / "wörk 中", tmp_path / "wörk 中" / "workspaces" / "smoke"
    workspace.mkdir(parents=True)
    ensure_dvc(clone)
    ensure_dvc(workspace, cache_of(clone))
    assert cache_of(workspace) == cache_of(clone) == clone / ".dvc" / "cache"


@pytest.mark.parametrize("folder", ["", "inside/run"])
def test_nothing_is_staged_in_the_clone_around_a_workspace(tmp_path: Path, folder: str) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    workspace = tmp_path / folder
    workspace.mkdir(parents=True, exist_ok=True)
    (workspace / ".dvcignore").write_text("as committed\n")
    (workspace / "own.txt").write_text("own")
    if folder:
        git("add", ".")
        git("commit", "--quiet", "-m", "own")
        (workspace / ".dvcignore").write_text("as staged\n")
        git("add", ".")
        (workspace / ".dvcignore").write_text("as edited\n")
    else:  # a clone without any commit, where nothing is staged
        (workspace / ".dvcignore").unlink()
    before = git("ls-files", "--stage")
    ensure_dvc(workspace)
    assert git("ls-files", "--stage") == before
    assert (workspace / ".dvc" / "config").is_file() and (workspace / ".dvcignore").is_file()
    untracked = git("status", "--porcelain", "--untracked-files=all")
    assert f"?? {folder + '/' if folder else ''}.dvc/config" in untracked


SHARED = """
stages:
  ppo: {cmd: wc -c < raw.txt > policy.txt, deps: [raw.txt], params: [seed], outs: [policy.txt]}
"""


def test_equal_computations_are_equal_by_hash_and_share_one_result(tmp_path: Path) -> None:
    hashes, actions = [], []
    for name in ("one", "two"):
        toy = make_toy(tmp_path / name, SHARED, f"seed: 1\nunread: {name}\n")
        (toy / "raw.txt").write_text("x")
        ensure_dvc(toy, tmp_path / "cache")
        node = read_graph(toy)["ppo"]
        assert node.inputs == ("raw.txt",) and node.params == {"params.yaml": ["seed"]}
        hashes.append(stage_hash(toy, node))
        actions.append(run_stage(StageSpec(toy, "ppo")).action)
    assert actions == ["ran", "cached"] and hashes[0] == hashes[1] is not None


def test_what_runs_always_or_has_no_inputs_is_never_shared(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, "stages:\n  a: {cmd: date > a, outs: [a]}\n  b: {cmd: date > b, deps: [a], outs: [b]}\n")
    ensure_dvc(toy)
    assert {name: node.shareable for name, node in read_graph(toy).items()} == {"a": False, "b": True}


def test_locks_of_dead_processes_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    code = "import time; time.sleep(60)"
    alive = subprocess.Popen([sys.executable, "-c", code, "dvc"])
    try:
        write = {"a": {"pid": dead.pid, "cmd": "dvc"}, "b": {"pid": alive.pid, "cmd": "dvc"}}
        read = {"c": [{"pid": dead.pid, "cmd": "dvc"}]}
        (tmp_path / "rwlock").write_text(json.dumps({"write": write, "read": read}))
        assert release_dvc_locks(tmp_path) == 2
        left = json.loads((tmp_path / "rwlock").read_text())
        assert left == {"write": {"b": {"pid": alive.pid, "cmd": "dvc"}}, "read": {}}
    finally:
        alive.kill()
        alive.wait()


def test_only_processes_of_a_dead_owner_are_ended(tmp_path: Path) -> None:
    dead, mine = f"999999:1:{tmp_path}", f"{os.getpid()}:x:{tmp_path}x"
    left = subprocess.Popen(["sleep", "60"], env=environment(RLHF_OWNER=dead))
    kept = subprocess.Popen(["sleep", "60"], env=environment(RLHF_OWNER=mine))
    try:
        assert kill_leftover_processes(tmp_path, patience=0.0) == 1
        assert left.wait(60) == -9 and psutil.pid_exists(kept.pid)
    finally:
        kept.kill()
        kept.wait()


def test_branches_run_together_and_a_failure_skips_later_stages() -> None:
    nodes = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}
    schedule = Schedule({n: StageNode(n, after, "", ()) for n, after in nodes.items()}, parallel=2)
    assert schedule.start_ready(stopping=False) == ["a"]
    schedule.record(outcome("a", "cached"))
    assert schedule.start_ready(stopping=False) == ["b", "c"]
    schedule.record(outcome("b", "failed", 3))
    assert schedule.start_ready(stopping=False) == [] and not schedule.finished
    schedule.record(outcome("c", "ran"))
    assert schedule.finished and schedule.outcomes["d"].action == "skipped"


@pytest.mark.parametrize(
    ("code", "expected"), [(1, True), (137, True), (75, False), (2, False), (3, False), (4, False)]
)
def test_only_crashes_are_tried_again(code: int, expected: bool) -> None:
    assert outcome("s", "failed", code).retryable is expected


def test_busy_time_counts_overlaps_once() -> None:
    assert busy_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0


def test_the_last_progress_line_counts() -> None:
    assert last_progress("x\nppo: 3/9 1 s kl 0.1\nppo: 4/9 2 s\nother") == LoggedProgress(4, 9, "ppo: 4/9 2 s")


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


def test_a_server_that_does_not_answer_is_named_in_one_line(tmp_path: Path) -> None:
    answer = rlhf("run", cwd=make_toy(tmp_path, PIPELINE), PREFECT_API_URL="http://127.0.0.1:9/api")
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1 and "PREFECT_API_URL" in answer.stderr

"""Promotion and rollback on an MLflow server with PostgreSQL: many at once, and killed at their
steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from champion import champion_folder
from killed_call import killed_before
from servers.small_registry import SmallRegistry
from unit.flows.registry.conftest import ScriptedMatch

from flows.registry.history import Ledger
from flows.registry.promote import promote, rollback
from flows.supervision.processes import child_environment

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
MACHINES, PROCESSES = 4, 2
MORE_THAN_ALL = 40
PROMOTE = """
import sys
from pathlib import Path
from scripted_match import match_result
from flows.registry.history import Ledger
from flows.registry.promote import promote
from rlhf_core.errors import RlhfError
print("ready", flush=True)
sys.stdin.readline()
try:
    decision = promote(Path(sys.argv[1]), version=sys.argv[2], play=lambda *_: match_result({"judge": 0.9}))
except RlhfError as error:
    print("refused", error)
else:
    print("promoted" if decision.promoted else "unchanged", decision.reason)
"""


@pytest.fixture
def registry(tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> SmallRegistry:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    return SmallRegistry.create(tmp_path, mlflow_server)


def start_promotion(workspace: Path, version: str, temporary: Path) -> subprocess.Popen[str]:
    """A process that promotes ``version`` once it reads a line. Its locks are those of the machine
    ``temporary``.
    """
    temporary.mkdir(exist_ok=True)
    env = child_environment(workspace, TMPDIR=str(temporary))
    tests = Path(__file__).resolve().parents[1]
    env["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests / "support"), env["PYTHONPATH"]])
    return subprocess.Popen(
        [sys.executable, "-c", PROMOTE, str(workspace), version],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "owned", [True, False], ids=["one workspace on a shared disk", "workspaces without an owner"]
)
def test_eight_processes_of_four_machines_leave_one_champion_and_a_consistent_history(
    registry: SmallRegistry, owned: bool
) -> None:
    owner = registry.workspace("owner")
    first = [registry.add_version()] if owned else []
    for version in first:
        assert promote(owner, version=version).promoted
    versions = [registry.add_version() for _ in range(MACHINES)]
    workspaces = [
        owner if owned else registry.workspace(f"workspace-{number}") for number in range(MACHINES)
    ]
    running = {
        (number, nth): start_promotion(
            workspaces[number], versions[number], registry.folder / f"machine-{number}"
        )
        for number in range(MACHINES)
        for nth in range(PROCESSES)
    }
    for process in running.values():
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in running.values():
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    printed = {key: process.communicate(timeout=3000)[0] for key, process in running.items()}
    assert all(process.returncode == 0 for process in running.values()), printed
    words = {key: text.strip().splitlines()[-1].partition(" ")[0] for key, text in printed.items()}
    assert set(words.values()) <= {"promoted", "unchanged", "refused"}, printed
    promoted = sorted(versions[number] for (number, _), word in words.items() if word == "promoted")
    champion_folder(owner)  # completes what is under way, if anything is
    assert sorted(registry.consistent_champions()) == sorted([*first, *promoted])
    assert promoted if owned else len(promoted) == 1, (
        "the first promotion makes its workspace the owner"
    )


@pytest.mark.parametrize("action", ["promote", "rollback"])
def test_what_was_killed_at_any_step_is_completed_or_has_not_begun(
    registry: SmallRegistry, action: str
) -> None:
    workspace = registry.workspace("owner")
    first = registry.add_version()
    promote(workspace, version=first)
    completed = []
    for step in range(1, MORE_THAN_ALL):
        version = registry.add_version()

        def win(version: str = version) -> object:
            return promote(workspace, version=version, play=ScriptedMatch(0.9))

        def undo() -> object:
            return rollback(workspace, "rude")

        call: Callable[[], object] = win
        if action == "rollback":
            win()
            call = undo
        before, expected = registry.champion(), version if action == "promote" else first
        killed = killed_before(step, call)
        decided = len(registry_entries(registry))
        champion_folder(workspace)  # any use of the registry completes what was decided
        assert (
            registry.champion() in (before, expected) and len(registry_entries(registry)) == decided
        )
        completed.append(registry.champion() == expected)
        if not completed[-1]:
            call()
        registry.consistent_champions()
        assert registry.champion() == expected
        if not killed:
            break
    assert not killed and completed == sorted(completed) and len(set(completed)) == 2


def registry_entries(registry: SmallRegistry) -> list[str]:
    """The entries of the history."""
    return list(Ledger.open(registry.client, registry.name).entries())

"""Eight processes from four workspaces, as if on four machines, promote at once on one MLflow server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.registry.conftest import Backend, copy_workspace, make_policy, policy_name
from integration.registry.test_promotion import aliases

from flows.registry.alias_transaction import champion_history
from flows.registry.governance.history import checked_history, history_ledger
from flows.registry.mlflow_client import connect
from flows.registry.register import register
from flows.supervision.environment import child_environment

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
WORKSPACES, PROCESSES = 4, 2
PROMOTE = """
import sys
from pathlib import Path
from scripted_match import match_result
from flows.registry.promotion import promote
from rlhf_core.errors import RlhfError
sys.stdin.readline()
try:
    decision = promote(Path(sys.argv[1]), version=sys.argv[2], play=lambda *_: match_result({"judge": 0.9}))
except RlhfError as error:
    print("refused", error)
else:
    print("promoted" if decision.promoted else "unchanged", decision.reason)
"""


def start_promotion(workspace: Path, version: str, temporary: Path) -> subprocess.Popen[str]:
    """A process that promotes ``version`` once it reads a line. Locks of processes are in their temporary folder."""
    temporary.mkdir(exist_ok=True)
    tests = str(Path(__file__).resolve().parents[1])
    env = child_environment(workspace, TMPDIR=str(temporary))
    env["PYTHONPATH"] = os.pathsep.join([tests, env["PYTHONPATH"]])
    return subprocess.Popen(
        [sys.executable, "-c", PROMOTE, str(workspace), version],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_one_champion_and_a_consistent_history(contest: Path, backend: Backend, tmp_path: Path) -> None:
    name, client = policy_name(contest), connect(contest)
    workspaces = [contest]
    versions = ["2"]
    for number in range(1, WORKSPACES):
        workspace = copy_workspace(contest, tmp_path / f"machine-{number}" / "contest")
        (workspace / ".rlhf" / "workspace_id").unlink()  # another workspace, not this one moved
        make_policy(workspace, 20 + number)
        versions.append(register(workspace).registered[name].version)
        workspaces.append(workspace)
    pairs = [pair for pair in zip(workspaces, versions, strict=True) for _ in range(PROCESSES)]
    running = [start_promotion(workspace, version, tmp_path / f"tmp-{version}") for workspace, version in pairs]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=3000)[0].strip().splitlines()[-1] for process in running]
    assert all(process.returncode == 0 for process in running), printed
    promoted = [line for line in printed if line.startswith("promoted")]
    assert promoted, printed
    records = checked_history(name, history_ledger(client, name).entries())
    promotions = [record for record in records if record["action"] == "promote"]
    # Each promotion that was reported is an entry, each entry names the champion it replaced, and the last one holds.
    assert len(promotions) == 1 + len(promoted)
    champions = [record["decided_on"] for record in promotions]
    assert [record["decision"]["champion"] for record in promotions[1:]] == champions[:-1]
    assert aliases(contest)["champion"] == champions[-1] == champion_history(client, name)[-1]
    assert "rlhf.intent" not in client.get_registered_model(name).tags

"""What must not lead to a promotion, on an MLflow server with PostgreSQL: each is refused in one
line, or repaired.
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg2
import pytest
from champion import champion_folder
from mlflow import MlflowClient
from servers.conftest import Servers
from servers.small_registry import SmallRegistry
from unit.flows.registry.conftest import ScriptedMatch

from flows.commands.registry_output import history_rows, model_history
from flows.commands.text import aligned
from flows.registry import decisions
from flows.registry.history import Ledger
from flows.registry.promote import promote, rollback
from flows.supervision.processes import child_environment
from rlhf_core.errors import RlhfError

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1200)]
APPROVE = """
import sys
from pathlib import Path
from flows.registry.promote import approve
from rlhf_core.errors import RlhfError
print("ready", flush=True)
sys.stdin.readline()
try:
    print("approved", approve(Path(sys.argv[1])).challenger)
except RlhfError as error:
    print("refused", error)
"""


@pytest.fixture
def contest(registry: SmallRegistry) -> Path:
    """The owner of version 1, the champion; version 2 is the challenger."""
    return registry.contested()


def win(workspace: Path) -> Any:
    return promote(workspace, play=ScriptedMatch(0.9))


def refused(action: Callable[[], object]) -> str:
    """The one line with which ``action`` is refused."""
    with pytest.raises(RlhfError) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)


def decided(registry: SmallRegistry) -> int:
    """How many entries the history has."""
    return len(Ledger.open(registry.client, registry.name).entries())


def test_a_version_that_was_made_challenger_by_hand_is_not_promoted(
    registry: SmallRegistry, contest: Path
) -> None:
    run = registry.client.get_model_version(registry.name, "1").run_id
    unjudged = registry.client.create_model_version(
        registry.name, f"runs:/{run}/model", run
    ).version
    registry.client.set_registered_model_alias(registry.name, "challenger", unjudged)
    assert "was not registered by this pipeline" in refused(lambda: win(contest))
    assert registry.champion() == "1"


def test_files_that_were_changed_in_the_store_after_registering(
    registry: SmallRegistry, contest: Path
) -> None:
    """The match would be played with other files than the gates judged, and others would be
    released.
    """
    run = registry.client.get_model_version(registry.name, "2").run_id
    changed = registry.folder / "config.json"
    changed.write_text(json.dumps({"made_by": "somebody else"}))
    registry.client.log_artifact(run, str(changed), "model/artifacts/hf")
    match = ScriptedMatch(0.9)
    line = refused(lambda: promote(contest, play=match))
    assert "version 2 are not the ones that were registered and judged" in line
    assert match.played == 0 and registry.champion() == "1" and decided(registry) == 1


def test_a_login_that_may_only_read(
    servers: Servers, registry: SmallRegistry, contest: Path
) -> None:
    with reader(servers):
        line = refused(lambda: win(contest))
        assert line.startswith("the model registry could not ") and "Permission denied" in line
        assert "promote: " in aligned(history_rows(model_history(contest))).plain
    assert registry.champion() == "1" and decided(registry) == 1
    assert win(contest).promoted and registry.consistent_champions() == ["1", "2"]


def test_a_database_that_takes_no_changes(
    servers: Servers, registry: SmallRegistry, contest: Path
) -> None:
    with read_only_database(servers):
        assert refused(lambda: win(contest)).startswith("the model registry could not ")
        assert registry.champion() == "1" and decided(registry) == 1
    assert win(contest).promoted and registry.consistent_champions() == ["1", "2"]


@pytest.mark.parametrize(
    "step", ["set_registered_model_tag", "log_param", "set_registered_model_alias"]
)
def test_a_server_that_is_killed_in_the_middle(
    servers: Servers,
    registry: SmallRegistry,
    contest: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    original, before = getattr(MlflowClient, step), decided(registry)

    def after_the_kill(*arguments: Any) -> Any:
        servers.call("kill", "mlflow")
        return original(*arguments)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, step, after_the_kill)
            assert refused(lambda: win(contest)).startswith("the model registry could not ")
    finally:
        servers.call("up", "mlflow")
    champion_folder(contest)
    assert (registry.champion() == "2") == (decided(registry) > before)
    win(contest)
    assert registry.consistent_champions() == ["1", "2"]


def test_two_people_on_two_machines_approve_at_once(registry: SmallRegistry, contest: Path) -> None:
    assert promote(contest, play=ScriptedMatch(0.9), approval=True).awaiting_approval
    people = []
    for name in ("ada", "alan"):
        machine = registry.folder / name
        machine.mkdir()
        env = child_environment(contest, TMPDIR=str(machine), RLHF_ACTOR=name)
        command = [sys.executable, "-c", APPROVE, str(contest)]
        people.append(
            subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in people:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in people:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = sorted(
        process.communicate(timeout=600)[0].strip().splitlines()[-1] for process in people
    )
    assert said[0] == "approved 2" and said[1].startswith("refused "), said
    assert "was approved by" in said[1] or "was changed from elsewhere meanwhile" in said[1]
    assert registry.champion() == "2"
    texts = Ledger.open(registry.client, registry.name).entries()
    assert [json.loads(text)["action"] for text in texts] == [
        "promote",
        "request approval",
        "approve",
    ]


def test_a_clock_that_jumps_back_changes_no_order(
    registry: SmallRegistry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = datetime(2001, 1, 1, tzinfo=UTC).isoformat(timespec="microseconds")
    with monkeypatch.context() as patch:
        patch.setattr(decisions, "utc_now", lambda: earlier)
        win(contest)
        rollback(contest, "rude")
    listed = aligned(history_rows(model_history(contest))).plain
    assert registry.champion() == "1" and decided(registry) == 3
    assert listed.index("promote") < listed.index("rollback")


@contextmanager
def reader(servers: Servers) -> Iterator[None]:
    """Act as a user of MLflow who may read everything and change nothing."""
    name, password = f"reader-{uuid4().hex[:8]}", uuid4().hex
    login = base64.b64encode(
        f"{servers.environment['MLFLOW_TRACKING_USERNAME']}:{servers.environment['MLFLOW_TRACKING_PASSWORD']}".encode()
    ).decode()
    request = urllib.request.Request(
        f"{servers.environment['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/users/create",
        json.dumps({"username": name, "password": password}).encode(),
        {"Authorization": f"Basic {login}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_USERNAME", name)
        patch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        yield


def query(servers: Servers, statement: str, database: str = "mlflow") -> None:
    """Execute SQL as the owner of MLflow's database."""
    host, _, _, user, password = (servers.folder / "pgpass").read_text().strip().split(":")
    settings = shlex.split((servers.folder / "settings").read_text())
    port = next(
        word.removeprefix("postgres_port=")
        for word in settings
        if word.startswith("postgres_port=")
    )
    connection = psycopg2.connect(
        host=host, port=port, user=user, password=password, dbname=database
    )
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(statement)
    connection.close()


@contextmanager
def read_only_database(servers: Servers) -> Iterator[None]:
    """PostgreSQL as a standby is: it answers, and refuses every change."""
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'mlflow'"
    query(servers, "ALTER DATABASE mlflow SET default_transaction_read_only = on", "postgres")
    query(servers, others, "postgres")
    try:
        yield
    finally:
        query(servers, "ALTER DATABASE mlflow RESET default_transaction_read_only", "postgres")
        query(servers, others, "postgres")

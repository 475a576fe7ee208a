"""On a real Prefect server: a promotion run suspends until a person has decided, and a new champion is an event."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.events.actions import RunDeployment
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Pending
from prefect_database import prefect_server

from flows.registry import promotion
from flows.registry.promotion_flow import promotion_flow

from .conftest import MODEL, PARAMS, Registry, ScriptedMatch

pytestmark = pytest.mark.services
SECONDS = 300


@pytest.fixture(scope="module")
def server(prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = tmp_path_factory.mktemp("prefect") / "prefect.db"
    shutil.copy(prefect_database, database)
    with prefect_server(database) as url:
        yield url


@pytest.fixture
def release(contest: Path) -> Path:
    """The owner's workspace, whose promotions need approval."""
    (contest / "params.yaml").write_text(PARAMS + "registry: {approval: true}\n")
    (contest / "dvc.yaml").write_text("stages: {}\n")
    return contest


@pytest.fixture
def client(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    monkeypatch.setenv("PREFECT_API_URL", server)
    with (
        temporary_settings({PREFECT_API_URL: server, PREFECT_LOGGING_TO_API_ENABLED: False}),
        get_client(sync_client=True) as client,
    ):
        yield client


class PromotionDeployment:
    """Runs of the promotion flow, in this process as a worker's child process runs them."""

    def __init__(self, client: SyncPrefectClient, workspace: Path) -> None:
        self.client, self.workspace = client, workspace
        self.id = client.create_deployment(client.create_flow_from_name(promotion_flow.name), workspace.name)

    def start(self) -> UUID:
        """Create a run and run it until it ends or suspends; return its id."""
        run = self.client.create_flow_run_from_deployment(self.id, parameters={"workspace": str(self.workspace)})
        self.go_on(run.id)
        return run.id

    def go_on(self, run: UUID) -> None:
        """Run a run that is scheduled."""
        self.client.set_flow_run_state(run, Pending())
        try:
            run_flow(promotion_flow, flow_run=self.client.read_flow_run(run), return_type="state")
        except Pause:
            assert self.state(run) == "Suspended"

    def state(self, run: UUID) -> str:
        return str(self.client.read_flow_run(run).state_name)


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {SECONDS} s"
        time.sleep(0.2)


def command(*words: str) -> None:
    from flows.cli import app

    with pytest.raises(SystemExit) as ended:
        app(args=[*words], prog_name="rlhf")
    assert not ended.value.code


def test_a_run_suspends_until_a_person_has_decided_and_automations_hear_of_it(
    registry: Registry,
    release: Path,
    client: SyncPrefectClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(promotion.promote.__kwdefaults__, "play", ScriptedMatch())
    deployment = PromotionDeployment(client, release)
    listener = client.create_deployment(client.create_flow_from_name("listener"), "listener")
    client.create_automation(
        AutomationCore(
            name="new champion",
            trigger=EventTrigger(
                expect={"rlhf.champion.changed"},
                match={"prefect.resource.id": f"rlhf.registered-model.{MODEL}"},
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=[RunDeployment(source="selected", deployment_id=listener)],
        )
    )
    first = deployment.start()
    assert deployment.state(first) == "Suspended"
    client.resume_flow_run(first)
    deployment.go_on(first)
    assert deployment.state(first) == "Suspended", "to resume it on the server is no approval"
    assert registry.aliases()["champion"] == "1"
    second = deployment.start()
    assert (deployment.state(first), deployment.state(second)) == ("Cancelled", "Suspended")
    capsys.readouterr()
    command("approve", "--reason", "read 50 replies", "--workspace", str(release))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("version 2 is champion: approved by ")
    assert printed[1] == "completed 1 suspended Prefect run"
    assert deployment.state(second) == "Approved" and registry.aliases()["champion"] == "2"
    assert deployment.state(deployment.start()) == "Completed", "there is nothing left to decide"

    def events() -> list[tuple[str, str | None, str]]:
        page = client.read_events(EventFilter(event=EventNameFilter(prefix=["rlhf."])))
        return sorted((e.event, e.payload["version"], e.payload["action"]) for e in page.events)

    expected = [
        ("rlhf.approval.requested", "2", "request approval"),
        ("rlhf.champion.changed", "2", "approve"),
        ("rlhf.previous.changed", "1", "approve"),
    ]
    wait_until(lambda: events() == expected, "events")
    of_listener = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[listener]))
    wait_until(lambda: client.read_flow_runs(flow_run_filter=of_listener), "run started by the automation")


def test_a_server_that_is_away_stops_no_decision(
    release: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    promotion.promote(release, play=ScriptedMatch())
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    command("decline", "--reason", "no", "--workspace", str(release))
    assert "a Prefect run that waits for it stays suspended: the Prefect server at" in capsys.readouterr().err
    assert "the events rlhf.approval.declined were not sent" in caplog.text and "the decision stands" in caplog.text

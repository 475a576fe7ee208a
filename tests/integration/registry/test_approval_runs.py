"""On a real Prefect server: runs suspend until a person has decided, and a new champion is an
event.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from background import prefect_server, wait_until
from integration.registry.conftest import policy_name
from integration.registry.test_promotion import ScriptedMatch, aliases
from integration.registry.test_unchanged import records
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.responses import SetStateStatus
from prefect.events.actions import RunDeployment
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Pending, Running, Suspended

from flows.commands.registry_output import model_history
from flows.commands.status import status
from flows.pipeline import flow as pipeline
from flows.pipeline.flow import rlhf_pipeline
from flows.pipeline.registration import promotion_flow
from flows.prefect_server.flow_runs import (
    HEARTBEAT,
    SILENCE,
    ZOMBIES,
    ensure_zombie_automation,
    zombie_automation,
)
from flows.registry.client import connect
from flows.registry.promote import decline, promote
from flows.registry.stored_models import verified_folder
from flows.stage import StageOutcome
from flows.workspace import LOCK_HELD_VARIABLE
from rlhf_core.errors import RlhfError

pytestmark = [
    pytest.mark.services,
    pytest.mark.parametrize("backend", ["sqlite"], indirect=True),
    pytest.mark.slow,
]
SECONDS = 300


@pytest.fixture(scope="module")
def server(prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with prefect_server(tmp_path_factory.mktemp("prefect"), prefect_database) as url:
        yield url


@pytest.fixture
def client(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    monkeypatch.setenv("PREFECT_API_URL", server)
    with (
        temporary_settings({PREFECT_API_URL: server, PREFECT_LOGGING_TO_API_ENABLED: False}),
        get_client(sync_client=True) as client,
    ):
        yield client


@pytest.fixture
def release(contest: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose promotions need approval, and whose challenger wins its match."""
    params = (contest / "params.yaml").read_text()
    (contest / "params.yaml").write_text(params + "registry: {approval: true}\n")
    monkeypatch.setitem(promote.__kwdefaults__, "play", ScriptedMatch(judge=0.9))
    return contest


class Deployment:
    """Runs of a flow as a deployment, in this process as a worker's child process runs them."""

    def __init__(self, client: SyncPrefectClient, flow: Flow[..., Any], workspace: Path) -> None:
        self.client, self.flow, self.workspace = client, flow, workspace
        self.id = client.create_deployment(client.create_flow_from_name(flow.name), workspace.name)

    def start(self) -> UUID:
        """Create a run and run it until it ends or suspends; return its id."""
        run = self.client.create_flow_run_from_deployment(
            self.id, parameters={"workspace": str(self.workspace)}
        )
        self.execute(run.id)
        return run.id

    def execute(self, run: UUID) -> None:
        """Run what is scheduled."""
        self.client.set_flow_run_state(run, Pending())
        try:
            run_flow(self.flow, flow_run=self.client.read_flow_run(run), return_type="state")
        except Pause:
            assert self.state(run) == "Suspended"

    def answer(self, run: UUID, *words: str) -> None:
        """Give a command that answers the form of a suspended run, and run what it resumes, as a
        worker does.
        """
        with ThreadPoolExecutor() as pool:
            given = pool.submit(command, *words, "--workspace", str(self.workspace))
            wait_until(
                lambda: given.done() or self.state(run) == "Resuming", SECONDS, "answer to the form"
            )
            if not given.done():
                self.execute(run)
            given.result()

    def state(self, run: UUID) -> str:
        return str(self.client.read_flow_run(run).state_name)


def cached_pipeline(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every stage of a pipeline be up to date, and the pipeline run as `rlhf run` runs it."""

    def every_stage_is_cached(graph: Mapping[str, Any], _: object) -> dict[str, StageOutcome]:
        return {name: StageOutcome(name, "cached", started=0.0, ended=0.0) for name in graph}

    monkeypatch.setenv("RLHF_ACTOR", "")  # restored afterwards
    monkeypatch.setattr(pipeline, "_run_stages", every_stage_is_cached)
    monkeypatch.setattr(pipeline.signals, "install", lambda: None)
    monkeypatch.setenv(
        LOCK_HELD_VARIABLE, str(workspace)
    )  # as `rlhf run` does, which holds the lock


def command(*words: str) -> None:
    from flows.cli import app

    with pytest.raises(SystemExit) as ended:
        app(args=[*words], prog_name="rlhf")
    assert not ended.value.code


def test_a_promotion_suspends_until_a_person_has_decided_and_an_automation_starts_then(
    release: Path, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = Deployment(client, promotion_flow, release)
    listener = client.create_deployment(client.create_flow_from_name("listener"), "listener")
    client.create_automation(
        AutomationCore(
            name="new champion",
            trigger=EventTrigger(
                expect={"rlhf.champion.changed"},
                match={"prefect.resource.id": f"rlhf.registered-model.{policy_name(release)}"},
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=[RunDeployment(source="selected", deployment_id=listener)],
        )
    )
    first = deployment.start()
    assert deployment.state(first) == "Suspended"
    assert client.resume_flow_run(first).status == SetStateStatus.REJECT, (
        "to resume it without an answer is none"
    )
    assert deployment.state(first) == "Suspended" and aliases(release)["champion"] == "1"
    screen = status(release).as_text().plain
    assert (
        "Not released yet: rlhf-policy version 2 waits for approval" in screen
        and "next: rlhf approve" in screen
    )
    second = deployment.start()
    assert (deployment.state(first), deployment.state(second)) == ("Cancelled", "Suspended")
    capsys.readouterr()
    deployment.answer(second, "approve", "--reason", "read 50 replies")
    assert capsys.readouterr().out.startswith("version 2 is champion: approved by ")
    assert deployment.state(second) == "Completed" and aliases(release)["champion"] == "2"
    assert "approved by" in client.read_flow_run(second).state.message
    assert deployment.state(deployment.start()) == "Completed", "there is nothing left to decide"

    def events() -> list[tuple[str, str, str | None, str]]:
        page = client.read_events(EventFilter(event=EventNameFilter(prefix=["rlhf."])), limit=50)
        return sorted(
            (e.event, e.payload["model"], e.payload["version"], e.payload["action"])
            for e in page.events
        )

    expected = [
        ("rlhf.approval.requested", "rlhf-policy", "2", "request approval"),
        ("rlhf.champion.changed", "rlhf-policy", "2", "approve"),
        ("rlhf.previous.changed", "rlhf-policy", "1", "approve"),
    ]
    wait_until(lambda: events() == expected, SECONDS, "events")
    of_listener = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[listener]))
    wait_until(
        lambda: client.read_flow_runs(flow_run_filter=of_listener),
        SECONDS,
        "run started by the automation",
    )


@pytest.mark.parametrize("flow", [promotion_flow, rlhf_pipeline], ids=["promotion", "pipeline"])
@pytest.mark.parametrize("approved", [True, False], ids=["approved", "refused"])
def test_the_form_on_the_server_decides(
    release: Path,
    client: SyncPrefectClient,
    monkeypatch: pytest.MonkeyPatch,
    flow: Flow[..., Any],
    approved: bool,
) -> None:
    cached_pipeline(release, monkeypatch)
    deployment = Deployment(client, flow, release)
    run = deployment.start()
    state = client.read_flow_run(run).state
    schema = client.read_flow_run_input(run, state.state_details.run_input_keyset["schema"])
    assert {"approve", "decided_by", "reason"} <= {*json.loads(schema)["properties"]}
    answer = {"approve": approved, "decided_by": "ada@example.org", "reason": ""}
    if not approved:
        answer["reason"] = "rude"
    incomplete = answer | ({"decided_by": ""} if approved else {"reason": " "})
    assert client.resume_flow_run(run, run_input=incomplete).status == SetStateStatus.REJECT
    assert client.resume_flow_run(run, run_input=answer).status == SetStateStatus.ACCEPT
    deployment.execute(run)
    assert deployment.state(run) == "Completed"
    assert aliases(release)["champion"] == ("2" if approved else "1")
    last = model_history(release).entries[-1]
    assert (last["action"], last["who"]) == (
        "approve" if approved else "decline",
        "ada@example.org",
    )


def test_a_scheduled_pipeline_suspends_once_and_then_has_nothing_to_do(
    release: Path, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_pipeline(release, monkeypatch)
    deployment = Deployment(client, rlhf_pipeline, release)
    first = deployment.start()
    assert deployment.state(first) == "Suspended" and aliases(release)["champion"] == "1"
    before = records(release)
    second = deployment.start()
    assert deployment.state(second) == "Completed" and deployment.state(first) == "Suspended"
    message = client.read_flow_run(second).state.message
    assert message.startswith(
        "nothing to do: every stage is up to date, rlhf-reward-model version 1 (as before)"
    )
    assert "Not released yet: rlhf-policy version 2 waits for approval" in message
    assert records(release) == before, "no run in MLflow, nothing new in the history"
    deployment.answer(first, "decline", "--reason", "rude")
    assert deployment.state(first) == "Completed" and aliases(release)["champion"] == "1"
    third = client.read_flow_run(deployment.start())
    assert (
        third.state_name == "Completed"
        and "version 2 was declined. declined by" in third.state.message
    )
    assert records(release)[0] == before[0]


def test_a_run_that_waits_for_an_earlier_request_is_not_asked(
    release: Path, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = Deployment(client, promotion_flow, release)
    first = deployment.start()
    decline(release, "rude")  # as on a machine that does not know the server
    assert promote(release, version="2", force_reason="not so rude").awaiting_approval
    capsys.readouterr()
    deployment.answer(first, "approve")
    assert capsys.readouterr().out.startswith("version 2 is champion")
    assert deployment.state(first) == "Suspended" and aliases(release)["champion"] == "2"
    client.resume_flow_run(first, run_input={"approve": True, "decided_by": "ada"})
    deployment.execute(first)
    assert "was approved by" in client.read_flow_run(first).state.message, "too late, and no error"


@pytest.mark.usefixtures("backend")
def test_a_run_that_waits_for_a_person_is_not_taken_for_dead(client: SyncPrefectClient) -> None:
    client.create_automation(zombie_automation(timedelta(seconds=40)))
    listener = client.create_deployment(client.create_flow_from_name("silent"), "silent")
    dead, waiting = (client.create_flow_run_from_deployment(listener).id for _ in range(2))
    resources = {run: f"prefect.flow-run.{run}" for run in (dead, waiting)}
    for run, resource in resources.items():
        client.set_flow_run_state(run, Running(), force=True)
        told = {"occurred": str(datetime.now(UTC)), "resource": {"prefect.resource.id": resource}}
        client.request("POST", "/events", json=[{"id": str(uuid4()), "event": HEARTBEAT, **told}])
    beats = EventFilter(  # runs of other tests may have theirs
        event=EventNameFilter(name=[HEARTBEAT]),
        resource=EventResourceFilter(id=list(resources.values())),
    )
    wait_until(
        lambda: len(client.read_events(beats, limit=9).events) == 2,
        SECONDS,
        "heartbeats on the server",
    )
    client.set_flow_run_state(waiting, Suspended(), force=True)
    wait_until(
        lambda: client.read_flow_run(dead).state_name == "Crashed", SECONDS, "end of the dead run"
    )
    time.sleep(5)
    assert client.read_flow_run(waiting).state_name == "Suspended"


@pytest.mark.usefixtures("backend")
def test_an_automation_that_waits_for_another_time_is_replaced(client: SyncPrefectClient) -> None:
    client.create_automation(zombie_automation(timedelta(seconds=90)))
    for _ in range(2):
        ensure_zombie_automation(pytest.fail)
        (standing,) = client.read_automations_by_name(ZOMBIES)
        assert isinstance(standing.trigger, EventTrigger) and standing.trigger.within == SILENCE


def test_an_answer_that_cannot_be_carried_out_is_an_error_of_the_command(
    release: Path, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = Deployment(client, promotion_flow, release)
    run = deployment.start()
    with pytest.raises(
        RlhfError, match=r"version 1 of .* does not wait for approval; version 2 does"
    ):
        command("approve", "--version", "1", "--workspace", str(release))
    assert deployment.state(run) == "Suspended"
    weights = next(
        verified_folder(
            release, connect(release).get_model_version(policy_name(release), "2")
        ).glob("*.safetensors")
    )
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(
        RlhfError, match=r"has not carried it out .*the files of rlhf-policy version 2 are not"
    ):
        deployment.answer(run, "approve")
    assert deployment.state(run) == "Failed" and aliases(release)["champion"] == "1"


def test_a_server_that_is_away_stops_no_decision(
    release: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    promote(release)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    command("decline", "--reason", "no", "--workspace", str(release))
    assert (
        "a Prefect run that waits for it may stay suspended: the Prefect server at" in caplog.text
    )
    assert (
        "the events rlhf.approval.declined were not sent" in caplog.text
        and "the decision stands" in caplog.text
    )

"""``rlhf status`` and ``rlhf doctor`` say what is so."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from integration.registry.conftest import policy_name

from flows.commands.doctor import doctor, doctor_rows, failures
from flows.commands.machine_checks import FAIL, OK, machine_checks
from flows.commands.status import status
from flows.commands.text import aligned
from flows.pipeline.events import EventLog, RunPlanned, StageEnded, StageStarted, new_events_file
from flows.pipeline.record import end_pipeline_run, start_pipeline_run
from flows.prefect_server.services import free_port
from flows.registry.promote import promote
from flows.registry.register import register
from flows.stage import StageOutcome
from flows.workspace import locked


def checked(folder: Path) -> tuple[str, int]:
    """What `rlhf doctor` prints, and how many checks failed."""
    checks = doctor(folder)
    return aligned(doctor_rows(checks)).plain, failures(checks)


@pytest.mark.slow
def test_status_shows_stages_gates_run_registry_and_partial_work(workspace: Path) -> None:
    run_id = start_pipeline_run(workspace, "demo · now")
    register(workspace, run_id)
    promote(workspace)
    (workspace / "work" / "ppo" / "abc" / "step-000005").mkdir(parents=True)
    (workspace / "metrics" / "ppo.json").write_text("{}")
    screen = status(workspace).as_text().plain
    assert "in use by: nobody" in screen
    assert "reward       up to date" in screen
    assert "ppo          stale: metrics/ppo.json modified" in screen
    assert "policy  passed\n" in screen
    assert "ppo: step-000005 (work/ppo/abc)" in screen
    assert (
        f"interrupted (its process is gone; the next run resumes)  (MLflow run {run_id})" in screen
    )
    assert f"{policy_name(workspace)}: 1 version; @champion v1, @challenger v1" in screen
    answer = json.loads(json.dumps(status(workspace).as_dict(), default=str))
    assert answer["stages"]["reward"] == "up to date" and answer["in_use_by"] is None
    assert {"gate": "policy", "passed": True, "mode": "enforce", "failed": []} in answer["gates"]
    assert answer["registry"]["champion"] == "1" and answer["next"]["command"].startswith("rlhf ")
    end_pipeline_run(run_id, "completed", workspace)
    assert "finished after" in status(workspace).as_text().plain


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_status_says_what_became_of_the_policy_of_the_workspace(contest: Path) -> None:
    name = policy_name(contest)
    screen = status(contest).as_text().plain
    assert (
        f"nobody has decided on {name} version 2" in screen
        and f"The champion of {name} is version 1." in screen
    )
    assert "next: rlhf promote" in screen
    assert promote(contest, force_reason="a test").promoted
    screen = status(contest).as_text().plain
    assert (
        f"Released by force: {name} version 2 is the champion. Promoted: forced: a test" in screen
    )
    assert (
        re.search(r"Decided by .*, \d{4}-\d\d-\d\d \d\d:\d\d UTC", screen)
        and "next: rlhf chat" in screen
    )
    (contest / "metrics" / "ppo.json").write_text("{}")
    assert "next: rlhf run" in status(contest).as_text().plain
    (contest / "dvc.lock").unlink()
    assert "No run has registered the policy in models/ yet" in status(contest).as_text().plain


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_status_of_a_new_workspace_creates_nothing(workspace: Path) -> None:
    (workspace / "mlflow.db").unlink()
    (workspace / "dvc.lock").unlink()
    screen = status(workspace).as_text().plain
    assert "ppo          made, but not known to DVC" in screen and "last run\n  none" in screen
    assert not (workspace / "mlflow.db").exists()
    shutil.rmtree(workspace / "models" / "policy")
    assert "ppo          not run yet" in status(workspace).as_text().plain


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_status_gives_up_on_a_server_that_hangs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as server:  # accepts connections and answers nothing
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        assert "does not answer" in status(workspace).as_text().plain
        server.setblocking(False)
        connections = 0
        with pytest.raises(BlockingIOError):
            while True:
                server.accept()[0].close()
                connections += 1
        assert connections <= 4, (
            "one to look for a listener and one request, by each of two sections"
        )


def test_status_names_the_holder_of_the_lock(workspace: Path) -> None:
    (workspace / ".rlhf").mkdir(exist_ok=True)
    record = {"pid": os.getpid(), "since": "2026-01-01T00:00:00", "command": "rlhf run"}
    (workspace / ".rlhf" / "lock").write_text(json.dumps(record))
    assert f"in use by: `rlhf run` (pid {os.getpid()}" in status(workspace).as_text().plain


@pytest.mark.parametrize(
    ("count", "said"),
    [(1, "1 record waits for MLflow"), (12, "12 records wait for MLflow"), (0, "")],
)
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_records_that_wait_are_named_where_no_run_delivers_them(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, count: int, said: str
) -> None:
    monkeypatch.setattr("flows.commands.status.waiting_records", lambda _: count)
    screen = status(workspace).as_text().plain
    assert said in screen and ("for MLflow to answer" in screen) == bool(said)
    with locked(workspace):
        assert "for MLflow to answer" not in status(workspace).as_text().plain


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_status_while_a_run_is_under_way_shows_its_progress_without_dvc(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flows.commands.status.dvc_status", lambda *_: pytest.fail("DVC is locked by the run")
    )
    writer = EventLog(new_events_file(workspace))
    log = workspace / ".rlhf" / "logs" / "ppo.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("ppo: 90/90 96 s\n")  # of an earlier run
    started = time.time() - 62
    writer.emit(RunPlanned(("fingerprint", "ppo", "report")))
    writer.emit(
        StageEnded(
            StageOutcome(
                "fingerprint", "ran", started=started, ended=started + 2.0, work_seconds=1.0
            )
        )
    )
    writer.emit(StageStarted("ppo", "gpu-pool", started, log_start=log.stat().st_size))
    with locked(workspace):
        assert "ppo          running for 1:0" in status(workspace).as_text().plain
        with log.open("a") as stream:
            stream.write(
                "ppo: 15/90 15 s reward 0.2 kl 0.5\nppo: 45/90 45 s reward 0.3418 kl 1.894\n"
            )
        screen = status(workspace).as_text().plain
        assert "stages\n  1/3 done after 0:0" in screen
        assert "  fingerprint  ran in 0:02\n" in screen
        assert re.search(
            r"ppo          running 45/90, 0:4\d left, 1/s, reward 0\.342, kl 1\.89\n", screen
        ), screen
        assert "  report       waiting\n" in screen


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_status_does_not_take_the_events_of_an_earlier_run_for_this_one(workspace: Path) -> None:
    earlier = {"kind": "RunPlanned", "time": 1.0, "stages": ["fingerprint", "ppo"]}
    new_events_file(workspace).write_text(json.dumps(earlier) + "\n")
    with locked(workspace):
        screen = status(workspace).as_text().plain
    assert "waiting" not in screen and "it keeps DVC from telling their state" in screen


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_healthy_machine_passes(workspace: Path) -> None:
    text, code = checked(workspace)
    assert code == 0, text
    assert "every parameter is known and in range" in text


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_doctor_names_what_is_wrong_and_what_to_do(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("PREFECT_API_URL", f"{dead}/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dead)
    (workspace / "params.yaml").write_text(
        "collect: {source: files, files: {preferences: [no/such/*.jsonl]}}\n"
    )
    text, code = checked(workspace)
    assert code
    assert "no file matches 'no/such/*.jsonl'" in text
    assert "unset PREFECT_API_URL" in text and "unset MLFLOW_TRACKING_URI" in text
    (workspace / "params.yaml").write_text("ppo: {iterations: many}\n")
    text, code = checked(workspace)
    assert code and "FAIL  params.yaml" in text and "ppo.iterations" in text


def test_a_folder_that_is_no_workspace_is_only_a_warning(tmp_path: Path) -> None:
    text, code = checked(tmp_path)
    assert code == 0 and "is not one (no params.yaml) → make one with `rlhf init DIR`" in text


def test_versions_are_checked_against_what_this_package_requires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    required = [
        "torch>=1",
        "fastapi<0.1",
        "rich<1",
        "httpx>=0.1",
        "no-such-package>=1",
        "peft<0.1; extra == 'lora'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: required)
    names = {re.split("[<>]", text)[0] for text in required}
    checks = {check.name: check for check in machine_checks() if check.name in names}
    assert {name: check.level for name, check in checks.items()} == {
        "torch": OK, "fastapi": FAIL, "rich": FAIL, "no-such-package": FAIL,
    }  # fmt: skip
    assert "newer ones refuse requests" in checks["fastapi"].finding
    assert checks["no-such-package"].finding == "not installed"


def test_where_this_package_is_not_installed_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    assert [check.level for check in machine_checks() if check.name == "packages"] == ["warn"]

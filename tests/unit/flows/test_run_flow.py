"""The process of the flow: it loads what it needs, waits for its file, and then begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.states import Completed, Failed, State

import flows.pipeline.flow
import flows.registry.mlflow_client
from flows.pipeline import run_flow

POLLS = 3


@pytest.mark.parametrize(
    ("options", "state", "promote", "status"),
    [([], Completed(), True, 0), (["--no-promote"], Completed(), False, 0), ([], Failed(), True, 1)],
)
def test_the_flow_begins_once_its_file_exists(
    options: list[str], state: State[Any], promote: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_file, begun, polls = tmp_path / "go", list[dict[str, object]](), list[float]()

    def pipeline(workspace: str, **settings: object) -> State[Any]:
        begun.append({"workspace": workspace, **settings})
        return state

    def poll(seconds: float) -> None:
        assert not begun
        polls.append(seconds)
        if len(polls) == POLLS:
            start_file.touch()

    monkeypatch.setattr(flows.pipeline.flow, "rlhf_pipeline", pipeline)
    monkeypatch.setattr(flows.registry.mlflow_client, "load_mlflow", lambda: None)
    monkeypatch.setattr(run_flow, "skip_last_collection", lambda: None)
    monkeypatch.setattr(run_flow, "_prepare_record", lambda workspace: None)
    monkeypatch.setattr(run_flow.time, "sleep", poll)
    assert run_flow.main([str(tmp_path), "--after", str(start_file), *options]) == status
    assert len(polls) == POLLS
    assert begun == [{"workspace": str(tmp_path), "promote": promote, "return_state": True}]


def test_a_flow_whose_command_died_before_it_began_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([100, 100, 1])
    monkeypatch.setattr(run_flow.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(run_flow.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(flows.registry.mlflow_client, "load_mlflow", lambda: None)
    monkeypatch.setattr(run_flow, "skip_last_collection", lambda: None)
    monkeypatch.setattr(run_flow, "_prepare_record", lambda workspace: None)
    assert run_flow.main([str(tmp_path), "--after", str(tmp_path / "go")]) == 1

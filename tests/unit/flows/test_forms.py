"""What Prefect's form of a deployment asks for, how its answers are understood, and the name that a
run gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from flows.jobs.stage_job import stage_job
from flows.pipeline.data_watch import data_watch
from flows.pipeline.flow import _run_name, assignments, rlhf_pipeline
from flows.pipeline.registration import promotion_flow
from flows.prefect_server.flow_runs import given_name


@pytest.mark.parametrize(
    "flow", [rlhf_pipeline, data_watch, promotion_flow, stage_job], ids=lambda flow: flow.name
)
def test_every_field_says_what_it_is_for(flow: Flow[Any, Any]) -> None:
    fields = parameter_schema(flow).model_dump_for_openapi()["properties"]
    assert [name for name, field in fields.items() if not field.get("description")] == []


def test_the_pipeline_asks_for_nothing_that_a_run_finds_out_itself() -> None:
    assert set(parameter_schema(rlhf_pipeline).properties) == {"workspace", "promote", "settings"}


def test_settings_of_the_form_are_those_of_the_command_line() -> None:
    settings = {
        "ppo.kl.coefficient": 0.1,
        "base": {"source": "a b"},
        "seed": 2,
        "collect.limit": None,
    }
    assert assignments(settings) == [
        "ppo.kl.coefficient=0.1",
        'base.source="a b"',
        "seed=2",
        "collect.limit=null",
    ]


def test_wrong_settings_end_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    state = rlhf_pipeline.fn(str(tmp_path), settings={"ppo.kl.coefficent": 0.1})
    assert state.is_failed() and state.name == "UserError"
    assert "ppo.kl.coefficent" in str(state.message) and "\n" not in str(state.message)


@pytest.mark.parametrize(
    ("flow", "files"),
    [
        (promotion_flow, {"params.yaml": "seed: 1\n"}),  # nothing is registered
        (promotion_flow, {"params.yaml": "registry: {aproval: true}\n"}),
        (data_watch, {"dvc.lock": "<<<<<<< HEAD\nschema: '2.0'\n=======\n"}),
        (rlhf_pipeline, {"params.yaml": "seeed: 1\n"}),
        (rlhf_pipeline, {"params.yaml": "seed: 1\n", ".rlhf": "a file, not a folder"}),
    ],
    ids=["nothing registered", "registry", "merge conflict", "parameters", "no room for a lock"],
)
def test_a_run_that_is_refused_ends_in_one_line(
    flow: Flow[Any, Any], files: dict[str, str], tmp_path: Path
) -> None:
    """Prefect logs an error that leaves a flow twice, each time with its traceback."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    state = flow.fn(str(tmp_path))
    assert state.is_failed() and state.name == "UserError"
    assert state.message and "\n" not in state.message


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("brave-otter", ""),
        ("try1", "try1"),
        ("long-kl", "long-kl"),
        ("demo · 2026-01-01 03:00:00",) * 2,
        ("", ""),
    ],
)
def test_a_name_that_was_given_stays(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__NAME", name)
    monkeypatch.chdir(tmp_path)
    assert given_name() == given
    assert _run_name().startswith(given or f"{tmp_path.name} · ")

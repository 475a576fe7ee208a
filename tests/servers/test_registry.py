"""The registry's tests on MLflow with PostgreSQL, a login, and artifacts in S3."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import requests
from integration.registry.conftest import policy_name
from integration.registry.test_promotion import (
    test_a_sure_winner_moves_the_aliases_and_is_written_down,
    test_rollback_swaps_and_the_next_run_does_not_undo_it,
    test_the_first_challenger_takes_the_empty_place_with_its_reward_model,
)
from integration.registry.test_registry import (
    test_a_champion_whose_files_were_changed_is_registered_again_and_replaced,
    test_a_pipeline_run_holds_parameters_final_numbers_and_files,
    test_both_models_are_registered_with_lineage_and_gate_report,
    test_versions_answer_through_pyfunc_and_are_plain_folders,
)
from servers.conftest import Servers

from flows.pipeline.record import start_pipeline_run
from flows.registry.client import connect
from flows.registry.promote import promote
from flows.registry.register import register
from rlhf_core.errors import RlhfError

__all__ = [
    "test_a_champion_whose_files_were_changed_is_registered_again_and_replaced",
    "test_a_pipeline_run_holds_parameters_final_numbers_and_files",
    "test_a_sure_winner_moves_the_aliases_and_is_written_down",
    "test_both_models_are_registered_with_lineage_and_gate_report",
    "test_rollback_swaps_and_the_next_run_does_not_undo_it",
    "test_the_first_challenger_takes_the_empty_place_with_its_reward_model",
    "test_versions_answer_through_pyfunc_and_are_plain_folders",
]
pytestmark = pytest.mark.servers


def test_without_the_login_nothing_is_registered(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "not the password")
    with pytest.raises(RlhfError, match="does not answer"):
        register(workspace)


def test_the_files_of_a_version_are_in_the_object_store(servers: Servers, workspace: Path) -> None:
    servers.require("s3")
    register(workspace)
    version = connect(workspace).get_model_version(policy_name(workspace), "1")
    store = boto3.client(
        "s3",
        endpoint_url=servers.environment["AWS_ENDPOINT_URL_S3"],
        region_name="us-east-1",
        aws_access_key_id=servers.environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=servers.environment["AWS_SECRET_ACCESS_KEY"],
    )
    pages = store.get_paginator("list_objects_v2").paginate(Bucket="mlflow")
    keys = [row["Key"] for page in pages for row in page.get("Contents", ())]
    logged = version.source.removeprefix("models:/")
    assert any(logged in key and key.endswith("model.safetensors") for key in keys)


def test_registering_and_promoting_take_few_requests(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a login each costs the server a check of the password. MLflow's client makes one for
    each file.
    """
    sent: list[str] = []
    send = requests.Session.request

    def counted(
        session: requests.Session, method: str, url: str, *more: Any, **options: Any
    ) -> requests.Response:
        sent.append(f"{method} {urlsplit(url).path}")
        return send(session, method, url, *more, **options)

    monkeypatch.setattr(requests.Session, "request", counted)
    totals = [0]
    run_id = start_pipeline_run(workspace, "demo · now")
    totals.append(len(sent))
    register(workspace, run_id)
    totals.append(len(sent))
    assert promote(workspace).promoted
    counts = [after - before for before, after in pairwise([*totals, len(sent)])]
    assert all(0 < count <= most for count, most in zip(counts, (6, 120, 70), strict=True)), (
        counts,
        Counter(sent),
    )
    assert not any("set-tag" in request and "runs/" in request for request in sent), (
        "tags go in batches"
    )

"""Registration by gates, what a version carries, and that it loads everywhere it promises to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flows.registry.mlflow_client import (
    connect,
    end_pipeline_run,
    fluent,
    log_final_artifacts,
    start_pipeline_run,
    tracking_uri,
)
from flows.registry.register import champion_folder, model_folder, register, versions
from flows.supervision.environment import child_environment
from flows.supervision.ports import free_port
from rlhf_core.errors import RlhfError
from rlhf_core.files import sha256_file, sha256_tree

CHAT = {"messages": [{"role": "user", "content": "what colour is the sky?"}]}
SCORED = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "blue."}]}


def test_both_models_are_registered_with_lineage_and_gate_report(workspace: Path) -> None:
    run_id = start_pipeline_run(workspace)
    result = register(workspace, run_id)
    assert result["refused"] == {}
    assert result["registered"]["rlhf-policy"]["version"] == "1"
    client = connect(workspace)
    version = client.get_model_version_by_alias("rlhf-policy", "challenger")
    assert version.tags["content_sha256"] == sha256_tree(workspace / "models" / "policy")
    assert version.tags["lineage.params_sha256"] == sha256_file(workspace / "params.yaml")
    assert version.tags["lineage.dvc_lock_sha256"] == sha256_file(workspace / "dvc.lock")
    assert version.tags["lineage.data"].endswith(".dir")
    assert version.tags["lineage.git_revision"] == "none"
    assert version.tags["reward_model_version"] == "1"
    assert json.loads(version.tags["gate"])["passed"] is True
    assert client.get_run(version.run_id).data.tags["mlflow.parentRunId"] == run_id
    assert client.get_run(run_id).info.status == "RUNNING"  # registering does not close the pipeline's run


def test_the_same_content_is_registered_once(workspace: Path) -> None:
    register(workspace)
    again = register(workspace)
    assert again["registered"]["rlhf-policy"] | {"content_sha256": ""} == {
        "version": "1",
        "reused": True,
        "content_sha256": "",
    }
    assert len(versions(connect(workspace), "rlhf-policy")) == 1


def test_a_failed_gate_in_report_mode_registers_nothing_of_it(workspace: Path, write_gate, commit) -> None:
    write_gate(workspace, "policy", ["metrics/evaluation.json", "metrics/ppo.json"], passed=False, mode="report")
    commit(workspace)
    result = register(workspace)
    assert list(result["registered"]) == ["rlhf-reward-model"]
    assert "did not pass (it only reports, mode: report): kl" in result["refused"]["rlhf-policy"]


def test_tampering_with_evidence_or_model_is_refused(workspace: Path) -> None:
    with (workspace / "metrics" / "evaluation.json").open("a") as stream:
        stream.write("\n")
    with (workspace / "models" / "reward" / "config.json").open("a") as stream:
        stream.write("\n")
    refused = register(workspace)["refused"]
    assert "metrics/evaluation.json is not the file that the policy gate judged" in refused["rlhf-policy"]
    assert "models/reward modified" in refused["rlhf-reward-model"]


def test_a_missing_gate_is_refused(workspace: Path) -> None:
    (workspace / "gates" / "policy.json").unlink()
    assert "has not judged this workspace" in register(workspace)["refused"]["rlhf-policy"]


def test_versions_answer_through_pyfunc_and_are_plain_folders(workspace: Path) -> None:
    import mlflow
    from transformers import AutoModelForCausalLM

    from rlhf_core.data.schema import Message
    from rlhf_core.evaluation.model_judge import ModelJudge
    from rlhf_core.evaluation.text_metrics import Reply

    register(workspace)
    connect(workspace).set_registered_model_alias("rlhf-policy", "champion", "1")
    with fluent(workspace):
        policy = mlflow.pyfunc.load_model("models:/rlhf-policy@champion")
        reward = mlflow.pyfunc.load_model("models:/rlhf-reward-model@challenger")
    params = {"max_new_tokens": 5, "seed": 3}
    first, second = policy.predict(CHAT, params=params), policy.predict(CHAT, params=params)
    assert first == second and first[0]["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= first[0]["usage"]["completion_tokens"] <= 5
    assert len(policy.predict([CHAT, CHAT], params={"max_new_tokens": 2, "temperature": 0.0})) == 2
    judge = ModelJudge(workspace / "models" / "reward", "reward")
    expected = judge.score([[Message("user", "what colour is the sky?")]], [Reply("blue.", True)])[0]
    assert reward.predict(SCORED)[0]["score"] == pytest.approx(expected, abs=1e-5)
    folder = champion_folder(workspace)
    assert sha256_tree(folder) == sha256_tree(workspace / "models" / "policy")
    AutoModelForCausalLM.from_pretrained(folder)
    assert model_folder(workspace, "rlhf-policy", "1") == folder


def test_no_champion_is_one_clear_line(workspace: Path) -> None:
    with pytest.raises(RlhfError, match="no champion of rlhf-policy in this workspace yet; `rlhf run` makes one"):
        champion_folder(workspace)


def test_a_pipeline_run_holds_parameters_final_numbers_and_files(workspace: Path) -> None:
    run_id = start_pipeline_run(workspace)
    sent = log_final_artifacts(workspace, run_id)
    end_pipeline_run(run_id, "Cancelled", workspace)
    assert sent == ["params.yaml", "dvc.lock", "metrics/", "gates/"]
    run = connect(workspace).get_run(run_id)
    assert run.info.status == "KILLED"
    assert run.data.params["evaluate.sampling.max_new_tokens"] == "8"
    assert run.data.metrics["evaluation.nested.win_rate"] == 0.7


def test_the_core_writes_to_the_same_record(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core import tracking

    assert tracking.tracking_uri(workspace) == tracking_uri(workspace)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    assert tracking.tracking_uri(workspace) == tracking_uri(workspace) == "sqlite:///elsewhere.db"


def test_a_server_that_does_not_answer_is_one_clear_line(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RlhfError, match=r"does not answer .*unset MLFLOW_TRACKING_URI"):
        connect(workspace)


@pytest.mark.services
def test_mlflow_serves_the_policy(workspace: Path) -> None:
    register(workspace)
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/rlhf-policy@challenger"]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    env = child_environment(workspace, MLFLOW_TRACKING_URI=tracking_uri(workspace))
    server = subprocess.Popen(
        command, cwd=workspace, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/ping", server)
        answer = _post(f"http://127.0.0.1:{port}/invocations", {**CHAT, "max_new_tokens": 4, "seed": 1})
        assert answer[0]["choices"][0]["message"]["role"] == "assistant"
        assert answer[0]["usage"]["completion_tokens"] <= 4
        table = {"dataframe_records": [CHAT, CHAT], "params": {"max_new_tokens": 2}}
        assert len(_post(f"http://127.0.0.1:{port}/invocations", table)["predictions"]) == 2
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{url} never answered")


def _post(url: str, body: object):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)

"""Registration by gates, what a version carries, and that it loads everywhere it promises to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from background import wait_for_answer
from champion import champion_folder
from integration.registry.conftest import commit, policy_name, reward_name, write_gate

from flows.pipeline.record import describe_run, end_pipeline_run, start_pipeline_run
from flows.prefect_server.services import free_port
from flows.registry.client import connect, experiment_id, fluent, versions
from flows.registry.evidence import ROW_COUNTS, source_of_version
from flows.registry.promote import promote
from flows.registry.register import NotRegistered, register
from flows.supervision.processes import child_environment
from rlhf_core import __version__
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.git import NO_REVISION, package_revision
from rlhf_core.storage.files import sha256_file, sha256_tree
from rlhf_core.tracking.pipeline_run import log_final_artifacts
from rlhf_core.tracking.stage_run import METRICS_TAG, tracking_uri

CHAT = {"messages": [{"role": "user", "content": "what colour is the sky?"}]}
REFUSED_REQUESTS = [
    ({"messages": []}, "messages is empty"),
    ({"top_p": 7.0}, "top_p: "),
    ({"max_tokens": 5000}, "exceeds the 256 of the model's context"),
]
SCORED = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "blue."}]}


def test_the_run_of_a_killed_pipeline_ends_when_the_next_one_begins(workspace: Path) -> None:
    client = connect(workspace)
    done = start_pipeline_run(workspace, "done")
    end_pipeline_run(done, "COMPLETED", workspace)
    killed = start_pipeline_run(workspace, "killed")
    present = start_pipeline_run(workspace, "present")
    ends = [client.get_run(run_id).info.status for run_id in (done, killed, present)]
    assert ends == ["FINISHED", "KILLED", "RUNNING"]


def test_both_models_are_registered_with_lineage_and_gate_report(workspace: Path) -> None:
    run_id = start_pipeline_run(workspace, "demo · now")
    result = register(workspace, run_id)
    assert result.refused == {}
    assert result.registered[policy_name(workspace)].version == "1"
    client = connect(workspace)
    version = client.get_model_version_by_alias(policy_name(workspace), "challenger")
    assert version.tags["content_sha256"] == sha256_tree(workspace / "models" / "policy")
    assert version.tags["lineage.params_sha256"] == sha256_file(workspace / "params.yaml")
    assert version.tags["lineage.dvc_lock_sha256"] == sha256_file(workspace / "dvc.lock")
    assert version.tags["lineage.data"].endswith(".dir")
    assert version.tags["lineage.git_revision"] == "none"
    assert "lineage.git_repository" not in version.tags
    assert version.tags["reward_model_version"] == "1"
    assert json.loads(version.tags["gate"])["passed"] is True and version.tags["gates"] == "passed"
    run = client.get_run(version.run_id)
    files = {
        a.path
        for folder in ("gates", "metrics")
        for a in client.list_artifacts(version.run_id, folder)
    }
    assert {
        "gates/data.json",
        "gates/reward.json",
        "gates/policy.json",
        "metrics/evaluation.json",
    } <= files
    logged = client.get_logged_model(version.source.removeprefix("models:/"))
    assert {m.key: m.value for m in logged.metrics} == run.data.metrics == {"final/kl": 1.0}
    assert run.data.tags["mlflow.parentRunId"] == run_id
    assert run.data.tags["mlflow.source.name"] == "rlhf run" and run.data.tags["mlflow.user"]
    assert [(given.dataset.name, given.dataset.digest) for given in run.inputs.dataset_inputs] == [
        ("data/clean", version.tags["lineage.data"])
    ]
    assert (
        client.get_run(run_id).info.status == "RUNNING"
    )  # registering does not close the pipeline's run
    assert register(workspace).registered[policy_name(workspace)].reused
    assert len(versions(client, policy_name(workspace))) == 1


@pytest.mark.slow
def test_a_champion_whose_files_were_changed_is_registered_again_and_replaced(
    workspace: Path, tmp_path: Path
) -> None:
    """The remedy that every refusal of changed files names; there is no earlier champion to go back
    to.
    """
    name, client = policy_name(workspace), connect(workspace)
    register(workspace)
    assert promote(workspace).promoted
    model_id = client.get_model_version(name, "1").source.removeprefix("models:/")
    (tmp_path / "changed" / "artifacts" / "policy").mkdir(parents=True)
    (tmp_path / "changed" / "artifacts" / "policy" / "added.txt").write_text("not what was judged")
    client.log_model_artifacts(model_id, str(tmp_path / "changed"))
    shutil.rmtree(
        workspace / ".rlhf" / "models", ignore_errors=True
    )  # this machine's copy of what a server stores
    with pytest.raises(
        ModelError,
        match="`rlhf run` registers the model again, and if it is the champion `rlhf promot",
    ):
        champion_folder(workspace)
    with pytest.raises(NotRegistered):
        register(workspace, known_only=True)
    again = register(workspace).registered
    assert (
        again[name].version == "2"
        and not again[name].reused
        and again[reward_name(workspace)].reused
    )
    with pytest.raises(ModelError, match="version 1 are not the ones that were registered"):
        promote(workspace)  # there is nothing to compare it with
    assert promote(workspace, force_reason="the files of version 1 were changed").promoted
    assert sha256_tree(champion_folder(workspace)) == sha256_tree(workspace / "models" / "policy")
    assert register(workspace, known_only=True).registered[name].reused


@pytest.mark.slow
def test_a_model_is_registered_as_ungated_where_a_gate_upstream_only_reported(
    workspace: Path,
) -> None:
    write_gate(
        workspace,
        "policy",
        ["metrics/evaluation.json", "metrics/ppo.json"],
        passed=False,
        mode="report",
    )
    commit(workspace)
    result = register(workspace)
    assert (
        result.registered[policy_name(workspace)].ungated
        == "the policy gate did not pass (mode: report): kl"
    )
    assert result.registered[reward_name(workspace)].ungated == ""
    assert (
        result.challenger(policy_name(workspace)) is None
        and result.challenger(reward_name(workspace)) == "1"
    )
    client = connect(workspace)
    assert client.get_registered_model(policy_name(workspace)).aliases == {}
    assert client.get_model_version(policy_name(workspace), "1").tags["gates"] == "ungated"
    write_gate(workspace, "policy", ["metrics/evaluation.json", "metrics/ppo.json"])
    commit(workspace)
    assert register(workspace).challenger(policy_name(workspace)) == "1", (
        "the bounds were mended, the files are the same"
    )
    tags = client.get_model_version(policy_name(workspace), "1").tags
    assert tags["gates"] == "passed" and "ungated" not in tags


def fail_gate(gate: str, evidence: str) -> Callable[[Path], None]:
    return lambda workspace: write_gate(workspace, gate, [f"metrics/{evidence}.json"], passed=False)


def without_conditions(workspace: Path) -> None:
    path = workspace / "gates" / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"conditions": []}))


def append(name: str) -> Callable[[Path], object]:
    return lambda workspace: (workspace / name).write_text((workspace / name).read_text() + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "committed", "policy", "reward"),
    [
        (
            fail_gate("data", "data"),
            True,
            "the data gate did not pass: kl",
            "the data gate did not pass: kl",
        ),
        (
            fail_gate("reward", "reward"),
            True,
            "the reward gate did not pass: kl",
            "the reward gate did not pass: kl",
        ),
        (fail_gate("policy", "evaluation"), True, "the policy gate did not pass: kl", ""),
        (without_conditions, True, "the policy gate has no conditions", ""),
        (
            lambda workspace: (workspace / "gates/policy.json").unlink(),
            False,
            "has not judged this workspace",
            "",
        ),
        (
            append("metrics/evaluation.json"),
            False,
            "is not the file that the policy gate judged",
            "",
        ),
        (
            append("models/reward/config.json"),
            False,
            "models/reward modified",
            "models/reward modified",
        ),
    ],
)
def test_what_the_gates_did_not_vouch_for_is_refused(
    workspace: Path, change: Callable[[Path], object], committed: bool, policy: str, reward: str
) -> None:
    change(workspace)
    if committed:
        commit(workspace)
    refused = register(workspace).refused
    assert policy in refused[policy_name(workspace)]
    assert reward in refused.get(reward_name(workspace), "") and bool(reward) == (
        reward_name(workspace) in refused
    )


@pytest.mark.slow
def test_versions_answer_through_pyfunc_and_are_plain_folders(workspace: Path) -> None:
    import mlflow
    from transformers import AutoModelForCausalLM

    from rlhf_core.data.schema import Message
    from rlhf_core.evaluation.judges.model import ModelJudge
    from rlhf_core.evaluation.replies import Reply

    register(workspace)
    connect(workspace).set_registered_model_alias(policy_name(workspace), "champion", "1")
    with fluent(workspace):
        policy = mlflow.pyfunc.load_model(f"models:/{policy_name(workspace)}@champion")
        reward = mlflow.pyfunc.load_model(f"models:/{reward_name(workspace)}@challenger")
    params = {"max_tokens": 5, "seed": 3}
    first, second = policy.predict(CHAT, params=params), policy.predict(CHAT, params=params)
    assert (
        first[0]["choices"] == second[0]["choices"]
        and first[0]["choices"][0]["message"]["role"] == "assistant"
    )
    assert 1 <= first[0]["usage"]["completion_tokens"] <= 5
    assert len(policy.predict([CHAT, CHAT], params={"max_tokens": 2, "temperature": 0.0})) == 2
    judge = ModelJudge.load(workspace / "models" / "reward", "reward")
    expected = judge.score([[Message("user", "what colour is the sky?")]], [Reply("blue.", True)])[
        0
    ]
    assert reward.predict(SCORED)[0]["score"] == pytest.approx(expected, abs=1e-5)
    folder = champion_folder(workspace)
    assert sha256_tree(folder) == sha256_tree(workspace / "models" / "policy")
    AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.slow
def test_mlflow_evaluates_what_was_registered(workspace: Path) -> None:
    """Both ways of MLflow, by the model's address alone: its signature and example say how to
    ask.
    """
    import mlflow
    import pandas
    from mlflow.genai.scorers import scorer

    register(workspace)
    data = pandas.DataFrame({"messages": [CHAT["messages"]] * 2, "expected": ["blue.", "grey."]})
    length = mlflow.models.make_metric(
        eval_fn=lambda predictions, metrics: float(predictions.str.len().mean()),
        greater_is_better=True,
        name="length",
    )
    uri = f"models:/{policy_name(workspace)}@challenger"
    with fluent(workspace), mlflow.start_run():
        info = mlflow.models.get_model_info(uri)
        assert (
            "choices" in info.signature.outputs.input_names()
            and info.saved_input_example_info is not None
        )
        result = mlflow.models.evaluate(
            uri, data, targets="expected", predictions="reply", extra_metrics=[length]
        )
        assert result.metrics["length"] > 0
        policy = mlflow.pyfunc.load_model(uri)

        @scorer
        def answered(outputs: str) -> bool:
            return bool(outputs)

        judged = mlflow.genai.evaluate(
            data=[{"inputs": {"messages": CHAT["messages"]}}],
            predict_fn=lambda messages: policy.predict({"messages": messages})[0]["reply"],
            scorers=[answered],
        )
        assert judged.metrics["answered/mean"] == 1.0
        rewards = pandas.DataFrame({"messages": [SCORED["messages"]] * 2, "expected": [0.1, 0.2]})
        uri = f"models:/{reward_name(workspace)}@challenger"
        scored = mlflow.models.evaluate(
            uri, rewards, targets="expected", predictions="score", model_type="regressor"
        )
        assert scored.metrics["mean_absolute_error"] >= 0


@pytest.mark.slow
def test_a_logged_model_comes_from_the_run_that_trained_it(workspace: Path) -> None:
    client = connect(workspace)
    experiment = experiment_id(client, workspace)
    of_ppo = {"rlhf.stage": "ppo", METRICS_TAG: sha256_file(workspace / "metrics" / "ppo.json")}
    trained = client.create_run(experiment, tags=of_ppo).info.run_id
    client.create_run(experiment, tags={"rlhf.stage": "ppo", METRICS_TAG: "of another result"})
    register(workspace)
    version = client.get_model_version_by_alias(policy_name(workspace), "challenger")
    logged = client.get_logged_model(version.source.removeprefix("models:/"))
    assert logged.source_run_id == trained and version.run_id != trained
    reward = client.get_model_version_by_alias(reward_name(workspace), "challenger")
    logged = client.get_logged_model(reward.source.removeprefix("models:/"))
    assert logged.source_run_id == reward.run_id, (
        "without a record of its training the registration made it"
    )


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_version_tells_how_many_rows_it_was_trained_on(workspace: Path) -> None:
    with (workspace / "params.yaml").open("a") as params:
        params.write("collect: {source: world}\nbase: {source: scratch}\n")
    counts = {"preferences": {"train": 12}, "prompts": {"train": 7}}
    (workspace / "metrics" / "data.json").write_text(json.dumps(counts))
    write_gate(workspace, "data", ["metrics/data.json"])
    commit(workspace)
    register(workspace, start_pipeline_run(workspace, "now"))
    client = connect(workspace)
    version = versions(client, policy_name(workspace))[0]
    source = source_of_version(client, version)
    assert source is not None and source.rows == 12
    own = client.get_run(version.run_id).data.metrics
    assert own[ROW_COUNTS["prompts.train"]] == 7.0, "of a workspace without pairs"


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_runs_and_models_name_one_repository_and_its_commit(workspace: Path) -> None:
    """That of the workspace; the package comes from another, as it does for everybody who has not
    cloned it.
    """

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        result = subprocess.run(
            ["git", *identity, *arguments], cwd=workspace, check=True, capture_output=True
        )
        return result.stdout.decode().strip()

    def source(tags: Mapping[str, str]) -> dict[str, str]:
        prefix = "mlflow.source.git."
        return {
            name.removeprefix(prefix): value
            for name, value in tags.items()
            if name.startswith(prefix)
        }

    client, name = connect(workspace), policy_name(workspace)
    outside = start_pipeline_run(workspace, "outside git")
    assert source(client.get_run(outside).data.tags) == {}
    git("init", "-q", "-b", "trials")
    git("add", "params.yaml", "dvc.yaml")
    git("commit", "-q", "-m", "recipe")
    git("remote", "add", "other", "https://example.org/other.git")
    git("remote", "add", "origin", "https://me:token@example.org/team/own.git")
    expected = {
        "commit": git("rev-parse", "HEAD"),
        "branch": "trials",
        "repoURL": "https://example.org/team/own.git",
    }
    run_id = start_pipeline_run(workspace, "in git")
    register(workspace, run_id)
    version = versions(client, name)[0]
    model = client.get_logged_model(version.source.removeprefix("models:/"))
    runs = [client.get_run(run_id).data.tags, client.get_run(version.run_id).data.tags]
    for tags in (*runs, model.tags):
        assert source(tags) == expected
        assert tags["rlhf.package_version"] == __version__ and "token" not in str(tags)
        assert tags.get("rlhf.package_commit", NO_REVISION) == package_revision()
    assert model.params["evaluate.prompts"] == "8" and model.source_run_id == version.run_id
    lineage = {
        "git_revision": expected["commit"],
        "git_repository": expected["repoURL"],
        "package_version": __version__,
    }
    if package_revision() != NO_REVISION:
        lineage["package_commit"] = package_revision()
    told = {name.removeprefix("lineage."): value for name, value in version.tags.items()}
    assert lineage.items() <= told.items()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_changed_artifact_is_refused_where_it_is_used(workspace: Path) -> None:
    import mlflow
    from mlflow.exceptions import MlflowException

    register(workspace)
    connect(workspace).set_registered_model_alias(policy_name(workspace), "champion", "1")
    (champion_folder(workspace) / "added.txt").write_text("not what was judged")
    with pytest.raises(
        ModelError, match="version 1 are not the ones that were registered and judged"
    ):
        champion_folder(workspace)
    with (
        fluent(workspace),
        pytest.raises(MlflowException, match="not the ones that were registered and judged"),
    ):
        mlflow.pyfunc.load_model(f"models:/{policy_name(workspace)}@champion")


def test_no_champion_is_one_clear_line(workspace: Path) -> None:
    with pytest.raises(
        RlhfError, match=r"no champion of .* in this workspace yet; `rlhf run` makes one"
    ):
        champion_folder(workspace)
    register(workspace)
    with pytest.raises(RlhfError, match="version 1 is challenger"):
        champion_folder(workspace)
    connect(workspace).delete_registered_model_alias(policy_name(workspace), "challenger")
    with pytest.raises(RlhfError, match=r"version 1 was not promoted.*`rlhf serve --version 1`"):
        champion_folder(workspace)


def test_a_pipeline_run_holds_parameters_final_numbers_and_files(workspace: Path) -> None:
    (workspace / "metrics" / "summary.json").write_text('{"judge.win_rate": 0.7, "kl": 2.0}')
    (workspace / "metrics" / "evaluation.json").write_text(
        '{"comparison": {"judge": {"win_rate": 0.70001}}, "kl": 2.0, "policy": {"length": 9}}'
    )
    run_id = start_pipeline_run(workspace, "demo · now")
    log_final_artifacts(connect(workspace), run_id, workspace)
    end_pipeline_run(run_id, "Cancelled", workspace)
    sent = {file.path for file in connect(workspace).list_artifacts(run_id)}
    assert sent == {"params.yaml", "dvc.lock", "metrics", "gates"}
    run = connect(workspace).get_run(run_id)
    assert run.info.status == "KILLED"
    assert run.data.params["evaluate.sampling.max_new_tokens"] == "8"
    # The headline alone; the other final numbers are metrics of the stages' runs.
    assert run.data.metrics == {"final/judge.win_rate": 0.70001, "final/kl": 2.0}
    assert run.info.run_name == "demo · now" and run.data.tags["workspace"] == workspace.name
    experiment = connect(workspace).get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.slow
def test_run_versions_and_models_are_described_by_the_verdict(workspace: Path) -> None:
    run_id = start_pipeline_run(workspace, "demo · now")
    register(workspace, run_id)
    describe_run(workspace, run_id, "better than SFT", "**Better than SFT**")
    client = connect(workspace)
    tags = client.get_run(run_id).data.tags
    assert (tags["verdict"], tags["mlflow.note.content"]) == (
        "better than SFT",
        "**Better than SFT**",
    )
    model = client.get_registered_model(policy_name(workspace))
    assert model.description.endswith(
        "version 1, from a run whose verdict on the policy is: better than SFT."
    )
    version = client.get_model_version(policy_name(workspace), "1")
    assert version.description == "Registered by the run demo · now.\n\n**Better than SFT**"
    # Another run that registers nothing new leaves the version to the run that made it.
    later = start_pipeline_run(workspace, "demo · later")
    register(workspace, later)
    describe_run(workspace, later, "worse than champion version 1", "**Worse**")
    assert client.get_model_version(policy_name(workspace), "1").description == version.description
    own = f"tags.`mlflow.parentRunId` = '{run_id}'"
    names = {
        run.info.run_name for run in client.search_runs([experiment_id(client, workspace)], own)
    }
    assert len(names) == 2 and all(f" · {workspace.name} · 2" in name for name in names)


def test_a_server_that_does_not_answer_is_one_clear_line(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RlhfError, match=r"does not answer .*unset MLFLOW_TRACKING_URI"):
        connect(workspace)


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_mlflow_serves_the_policy_and_refuses_in_one_line(workspace: Path) -> None:
    register(workspace)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "models",
        "serve",
        "-m",
        f"models:/{policy_name(workspace)}@challenger",
    ]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    env = child_environment(workspace, MLFLOW_TRACKING_URI=tracking_uri(workspace))
    server = subprocess.Popen(
        command,
        cwd=workspace,
        env=env,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/invocations"
    try:
        wait_for_answer(f"http://127.0.0.1:{port}/ping", server)
        answer = _post(url, {**CHAT, "max_tokens": 4, "seed": 1})
        assert answer[0]["choices"][0]["message"]["role"] == "assistant"
        assert answer[0]["usage"]["completion_tokens"] <= 4
        table = {"dataframe_records": [CHAT, CHAT], "params": {"max_tokens": 2}}
        assert len(_post(url, table)["predictions"]) == 2
        for change, reason in REFUSED_REQUESTS:
            with pytest.raises(urllib.error.HTTPError) as refusal:
                _post(url, {**CHAT, **change})
            body = refusal.value.read().decode()
            assert refusal.value.code == 400 and reason in body
            assert "Traceback" not in body and str(workspace) not in body and "\\n" not in body, (
                body
            )
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)


def _post(url: str, body: object):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)

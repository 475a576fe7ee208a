"""A workspace as a finished run leaves it, made in seconds: real DVC, tiny real models, gates with
true hashes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from background import wait_for_answer
from clean_files import write_rows
from dvc.repo import Repo
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache
from tiny_llama import tiny_config
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerBase

from flows.prefect_server.services import free_port
from flows.supervision.processes import child_environment
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.models.causal_lm import load_tokenizer, train_tokenizer
from rlhf_core.storage.files import sha256_file

BACKENDS = ["sqlite", pytest.param("server", marks=pytest.mark.slow)]
DVC_YAML = """
stages:
  validate: {cmd: "true", outs: [data/clean, gates/data.json], metrics: [metrics/data.json]}
  sft: {cmd: "true", deps: [data/clean], metrics: [metrics/sft.json]}
  gate-sft: {cmd: "true", deps: [metrics/sft.json], outs: [gates/sft.json, gates/sft.pass]}
  reward: {cmd: "true", deps: [data/clean, gates/sft.pass], outs: [models/reward], metrics: [metrics/reward.json]}
  referee: {cmd: "true", deps: [data/clean], outs: [models/referee], metrics: [metrics/referee.json]}
  judge: {cmd: "true", deps: [data/clean], outs: [models/judge], metrics: [metrics/judge.json]}
  gate-reward:
    cmd: "true"
    deps: [metrics/reward.json, metrics/referee.json, metrics/judge.json]
    outs: [gates/reward.json, gates/reward.pass]
  ppo:
    cmd: "true"
    deps: [models/reward, gates/reward.pass]
    outs: [models/policy]
    metrics: [metrics/ppo.json]
  evaluate: {cmd: "true", deps: [models/policy, models/referee, models/judge], metrics: [metrics/evaluation.json]}
  gate-policy: {cmd: "true", deps: [metrics/evaluation.json, metrics/ppo.json], outs: [gates/policy.json]}
"""
# A webhook may reach this machine, is sent as soon as it is created, and has its secret encrypted
# in the database.
WEBHOOK_SETTINGS = {
    "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
    "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http",
    "MLFLOW_WEBHOOK_CACHE_TTL": "0",
    "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
}
PARAMS = "seed: 1\nevaluate: {prompts: 8, bootstrap: 100, sampling: {max_new_tokens: 8}}\n"


def save_model(folder: Path, tokenizer: PreTrainedTokenizerBase, kind: type, seed: int) -> None:
    torch.manual_seed(seed)
    kind(tiny_config(tokenizer, max_position_embeddings=256)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_gate(
    workspace: Path, gate: str, evidence: list[str], passed: bool = True, mode: str = "enforce"
) -> None:
    condition = {
        "metric": "kl",
        "value": 1.0,
        "bound": "<= 6",
        "sign": "<=",
        "limit": 6.0,
        "passed": passed,
        "why": "test",
    }
    hashes = {name: sha256_file(workspace / name) for name in evidence}
    report = {
        "gate": gate,
        "passed": passed,
        "mode": mode,
        "conditions": [condition],
        "evidence": hashes,
    }
    (workspace / "gates").mkdir(exist_ok=True)
    (workspace / "gates" / f"{gate}.json").write_text(json.dumps(report))


def commit(workspace: Path) -> None:
    """Let dvc.lock record the files as they are; in this process, where DVC is imported once."""
    with chdir(workspace), Repo() as repo:
        repo.commit(force=True)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace that tests copy. Its name has a space, because users' folders do."""
    workspace = tmp_path_factory.mktemp("registry") / "my workspace"
    workspace.mkdir()
    (workspace / "params.yaml").write_text(PARAMS)
    (workspace / "dvc.yaml").write_text(DVC_YAML)
    tokenizer = train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280)
    save_model(workspace / "models" / "policy", tokenizer, LlamaForCausalLM, 1)
    save_model(workspace / "models" / "reward", tokenizer, LlamaForSequenceClassification, 2)
    save_model(workspace / "models" / "referee", tokenizer, LlamaForSequenceClassification, 3)
    save_model(workspace / "models" / "judge", tokenizer, LlamaForSequenceClassification, 4)
    rows = [
        Prompt(f"{i:016x}", [Message("user", f"question {i}?")], "other", "test", str(i))
        for i in range(8)
    ]
    write_rows(workspace / "data" / "clean" / "prompts" / "test.parquet", rows)
    (workspace / "metrics").mkdir()
    for name in ("data", "sft", "reward", "referee", "judge", "ppo", "evaluation"):
        (workspace / "metrics" / f"{name}.json").write_text(
            '{"kl": 1.0, "nested": {"win_rate": 0.7}}'
        )
    write_gate(workspace, "data", ["metrics/data.json"])
    write_gate(workspace, "sft", ["metrics/sft.json"])
    (workspace / "gates" / "sft.pass").write_text("passed\n")
    write_gate(
        workspace, "reward", ["metrics/reward.json", "metrics/referee.json", "metrics/judge.json"]
    )
    (workspace / "gates" / "reward.pass").write_text("passed\n")
    write_gate(workspace, "policy", ["metrics/evaluation.json", "metrics/ppo.json"])
    subprocess.run(
        [sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=workspace, check=True
    )
    commit(workspace)
    previous = dict(os.environ)
    from flows.registry.client import prepare_tracking

    prepare_tracking(workspace)
    assert dict(os.environ).get("MLFLOW_TRACKING_URI") == previous.get("MLFLOW_TRACKING_URI")
    return workspace


@dataclass(frozen=True)
class Backend:
    """Where a test's registry lives. ``uri`` is None for the workspace's own SQLite file."""

    uri: str | None = None

    def adopt(self, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give the workspace registered models and an experiment of its own on the server."""
        if self.uri is None:
            return
        monkeypatch.setenv("MLFLOW_TRACKING_URI", self.uri)
        own = uuid4().hex[:8]
        names = f"registry: {{policy: policy-{own}, reward_model: reward-{own}}}\ntracking: {{experiment: e-{own}}}\n"
        (workspace / "params.yaml").write_text(PARAMS + names)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real MLflow server on loopback that serves artifacts too."""
    with running_mlflow(tmp_path_factory.mktemp("mlflow")) as address:
        yield address


@contextmanager
def running_mlflow(folder: Path) -> Iterator[str]:
    """Run a real MLflow server, whose database and artifacts are in ``folder``."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    command += [
        f"--backend-store-uri=sqlite:///{folder}/mlflow.db",
        f"--artifacts-destination={folder}/artifacts",
    ]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--serve-artifacts"],
            cwd=folder,
            env=child_environment(folder, **WEBHOOK_SETTINGS),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_answer(f"http://127.0.0.1:{port}/health", server, folder / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every test that uses the registry runs on a SQLite file and against a real server."""
    return Backend(request.getfixturevalue("mlflow_server") if request.param == "server" else None)


@pytest.fixture
def workspace(
    finished: Path, tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy that a test may change, with a record of its own."""
    workspace = copy_workspace(finished, tmp_path / "my workspace")
    backend.adopt(workspace, monkeypatch)
    return workspace


@pytest.fixture(scope="session")
def champion_and_challenger(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = copy_workspace(finished, tmp_path_factory.mktemp("contest") / "my workspace")
    begin_contest(workspace)
    return workspace


@pytest.fixture(scope="session")
def champion_and_challenger_on_server(
    finished: Path, mlflow_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    workspace = copy_workspace(finished, tmp_path_factory.mktemp("contest") / "my workspace")
    with pytest.MonkeyPatch.context() as patch:
        Backend(mlflow_server).adopt(workspace, patch)
        begin_contest(workspace)
    return workspace


@pytest.fixture
def contest(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A workspace whose registry has version 1 as champion and version 2 as challenger."""
    if backend.uri is None:
        return copy_workspace(
            request.getfixturevalue("champion_and_challenger"), tmp_path / "contest"
        )
    source: Path = request.getfixturevalue("champion_and_challenger_on_server")
    workspace = copy_workspace(source, tmp_path / "contest")
    backend.adopt(workspace, monkeypatch)
    for name in (policy_name, reward_name):
        copy_registered_model(workspace, name(source), name(workspace))
    return workspace


def copy_registered_model(workspace: Path, source: str, target: str) -> None:
    """Versions, aliases and tags of ``source`` under another name, whose history is empty; the
    models are the same.
    """
    from flows.registry.client import OWNER_TAG, connect, versions
    from flows.registry.history import DONE_TAG

    client = connect(workspace)
    model = client.get_registered_model(source)
    client.create_registered_model(
        target,
        tags={key: value for key, value in model.tags.items() if key not in (DONE_TAG, OWNER_TAG)},
    )
    for version in reversed(versions(client, source)):
        logged = version.source.removeprefix(
            "models:/"
        )  # found versions do not carry their model_id
        client.create_model_version(
            target, version.source, version.run_id, tags=version.tags, model_id=logged
        )
    for alias, number in model.aliases.items():
        client.set_registered_model_alias(target, alias, str(number))


def begin_contest(workspace: Path) -> None:
    from flows.registry.promote import promote
    from flows.registry.register import register

    register(workspace)
    assert promote(workspace).reason == "there was no champion"
    make_policy(workspace, 7)
    assert register(workspace).registered[policy_name(workspace)].version == "2"


def policy_name(workspace: Path) -> str:
    return load_section(workspace, "registry", RegistryConfig).policy


def reward_name(workspace: Path) -> str:
    return load_section(workspace, "registry", RegistryConfig).reward_model


def copy_workspace(source: Path, target: Path) -> Path:
    """The folder with its record, which names the places of artifacts in the copy."""
    from flows.registry.client import repair_moved

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("mlflow.db-*"))
    # MLflow remembers the place of a run's artifacts by the run's id, which the copy shares.
    _artifact_repos_cache.clear()
    repair_moved(target)
    return target


def make_policy(workspace: Path, seed: int) -> None:
    tokenizer = load_tokenizer(workspace / "models" / "reward")
    save_model(workspace / "models" / "policy", tokenizer, LlamaForCausalLM, seed)
    commit(workspace)

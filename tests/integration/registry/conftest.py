"""A workspace as a finished run leaves it, made in seconds: real DVC, tiny real models, gates with true hashes."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerBase

from rlhf_core.data.schema import Message, Prompt, write_rows
from rlhf_core.files import sha256_file
from rlhf_core.models.base import load_tokenizer, train_tokenizer

DVC_YAML = """
stages:
  validate: {cmd: "true", outs: [data/clean]}
  reward: {cmd: "true", deps: [data/clean], outs: [models/reward], metrics: [metrics/reward.json]}
  referee: {cmd: "true", deps: [data/clean], outs: [models/referee], metrics: [metrics/referee.json]}
  gate-reward: {cmd: "true", deps: [metrics/reward.json, metrics/referee.json], outs: [gates/reward.json]}
  ppo: {cmd: "true", deps: [models/reward], outs: [models/policy], metrics: [metrics/ppo.json]}
  evaluate: {cmd: "true", deps: [models/policy, models/referee], metrics: [metrics/evaluation.json]}
  gate-policy: {cmd: "true", deps: [metrics/evaluation.json, metrics/ppo.json], outs: [gates/policy.json]}
"""
PARAMS = "seed: 1\nevaluate: {prompts: 8, bootstrap: 100, sampling: {max_new_tokens: 8}}\n"


def save_model(folder: Path, tokenizer: PreTrainedTokenizerBase, kind: type, seed: int) -> None:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=1,
    )
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_gate(workspace: Path, gate: str, evidence: list[str], passed: bool = True, mode: str = "enforce") -> None:
    condition = {
        "metric": "kl",
        "value": 1.0,
        "bound": "<= 6",
        "limit": 6.0,
        "passed": passed,
        "why": "test",
        "note": "",
    }
    hashes = {name: sha256_file(workspace / name) for name in evidence}
    report = {"gate": gate, "passed": passed, "mode": mode, "conditions": [condition], "evidence": hashes}
    (workspace / "gates").mkdir(exist_ok=True)
    (workspace / "gates" / f"{gate}.json").write_text(json.dumps(report))


def commit(workspace: Path) -> None:
    """Let dvc.lock record the files as they are."""
    subprocess.run(
        [sys.executable, "-m", "dvc", "commit", "--force", "--quiet"], cwd=workspace, check=True, capture_output=True
    )


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
    rows = [Prompt(f"{i:016x}", [Message("user", f"question {i}?")], "other", "test", str(i)) for i in range(8)]
    write_rows(workspace / "data" / "clean" / "prompts" / "test.parquet", rows)
    (workspace / "metrics").mkdir()
    for name in ("reward", "referee", "ppo", "evaluation"):
        (workspace / "metrics" / f"{name}.json").write_text('{"kl": 1.0, "nested": {"win_rate": 0.7}}')
    write_gate(workspace, "reward", ["metrics/reward.json", "metrics/referee.json"])
    write_gate(workspace, "policy", ["metrics/evaluation.json", "metrics/ppo.json"])
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=workspace, check=True)
    commit(workspace)
    previous = dict(os.environ)
    from flows.registry.mlflow_client import prepare_tracking

    prepare_tracking(workspace)
    assert dict(os.environ).get("MLFLOW_TRACKING_URI") == previous.get("MLFLOW_TRACKING_URI")
    return workspace


@pytest.fixture
def workspace(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may change, with a record of its own."""
    return copy_workspace(finished, tmp_path / "my workspace")


@pytest.fixture(scope="session")
def champion_and_challenger(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from flows.registry.promotion import promote
    from flows.registry.register import register

    workspace = copy_workspace(finished, tmp_path_factory.mktemp("contest") / "my workspace")
    register(workspace)
    assert promote(workspace)["reason"] == "there is no champion yet"
    make_policy(workspace, 7)
    assert register(workspace)["registered"]["rlhf-policy"]["version"] == "2"
    return workspace


@pytest.fixture
def contest(champion_and_challenger: Path, tmp_path: Path) -> Path:
    """A workspace whose registry has version 1 as champion and version 2 as challenger."""
    return copy_workspace(champion_and_challenger, tmp_path / "contest")


def copy_workspace(source: Path, target: Path) -> Path:
    """The folder with its record; MLflow keeps absolute places of artifacts, so these are moved along."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("mlflow.db-*"))
    places = {
        "experiments": ("artifact_location",),
        "runs": ("artifact_uri",),
        "logged_models": ("artifact_location",),
        "model_versions": ("source", "storage_location"),
    }
    # MLflow remembers the place of a run's artifacts by the run's id, which the copy shares.
    _artifact_repos_cache.clear()
    with sqlite3.connect(target / "mlflow.db") as database:
        for table, columns in places.items():
            for column in columns:
                for old, new in ((source.as_uri(), target.as_uri()), (str(source), str(target))):
                    database.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old, new))
    return target


def make_policy(workspace: Path, seed: int) -> None:
    tokenizer = load_tokenizer(workspace / "models" / "reward")
    save_model(workspace / "models" / "policy", tokenizer, LlamaForCausalLM, seed)
    commit(workspace)


@pytest.fixture(name="write_gate")
def write_gate_fixture() -> Callable[..., None]:
    return write_gate


@pytest.fixture(name="commit")
def commit_fixture() -> Callable[[Path], None]:
    return commit

"""A loaded model goes through the first stages under the profile for such models, and a wrecked one is stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from smollm2 import SMOLLM2, needs_smollm2
from transformers import AutoTokenizer
from unit.training.tiny import SHAPE

from flows.commands.init import initialise
from rlhf_core.config.loading import load_params, merge
from rlhf_core.errors import ConfigError, GateFailed
from rlhf_core.models.starting.base import new_model, save_policy
from rlhf_core.stages.runtime.runner import run_stage

FEW = [
    "collect.world.demonstrations=300",
    "collect.world.preferences=400",
    "collect.world.pretrain=60",
    "sft.steps=4",
    "sft.batch_size=4",
    "sft.samples=1",
]


pytestmark = [needs_smollm2, pytest.mark.slow]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, and the tokenizer and chat template of SmolLM2."""
    assert SMOLLM2 is not None
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    tokenizer = AutoTokenizer.from_pretrained(str(SMOLLM2.parent), gguf_file=SMOLLM2.name, padding_side="left")
    shape = SHAPE.model_copy(update={"max_positions": 512})
    save_policy(folder, new_model(shape, tokenizer, seed=1), tokenizer)
    return folder


@pytest.fixture(scope="module")
def prepared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace up to the base model."""
    workspace = tmp_path_factory.mktemp("workspace") / "run"
    initialise(workspace, None, [f"base.source={base}", *FEW])
    for stage in ("collect", "validate", "base"):
        run_stage(stage, workspace)
    return workspace


def test_a_sound_run_passes_the_gate(prepared: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "run"
    shutil.copytree(prepared, workspace)
    run_stage("sft", workspace)
    run_stage("gate-sft", workspace)
    metrics = json.loads((workspace / "metrics/sft.json").read_text())
    assert metrics["perplexity"] <= metrics["perplexity_before"]
    assert load_params(workspace).sft.optimizer.lr == 1e-5


def test_the_demos_learning_rate_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.optimizer\.lr 0\.003 \(about 1e-05\).*profile pretrained"):
        initialise(tmp_path / "run", "own-data", [f"base.source={base}", "sft.optimizer.lr=3e-3"])
    assert not (tmp_path / "run" / "params.yaml").exists()


def test_who_insists_is_stopped_at_the_gate(prepared: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "run"
    shutil.copytree(prepared, workspace)
    params = workspace / "params.yaml"
    insisting = ["base.allow_high_learning_rates=true", "sft.optimizer.lr=3.0"]
    params.write_text(merge(params.read_text(), sets=insisting))
    run_stage("sft", workspace)
    with pytest.raises(GateFailed, match="perplexity"):
        run_stage("gate-sft", workspace)
    assert not (workspace / "gates/sft.pass").exists()

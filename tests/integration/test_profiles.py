"""Profiles in small: every stage on real Chinese pairs, and a loaded model that is sound or
wrecked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from smollm2 import SMOLLM2, needs_smollm2
from transformers import AutoTokenizer
from unit.training.tiny import SHAPE

from flows.commands.init import initialise
from rlhf_core.config.loading import load_params
from rlhf_core.config.profiles import merge
from rlhf_core.data.schema import Preference, read_rows
from rlhf_core.data.tokens import decode_reply, encode_dialogue
from rlhf_core.errors import ConfigError, GateFailed
from rlhf_core.models.causal_lm import load_tokenizer, new_model, save_policy
from rlhf_core.stages.runtime.runner import run_stage

FEW = """
base.hidden_size=32 base.intermediate_size=48 base.layers=1 sft.steps=2 sft.batch_size=2 sft.samples=1
reward.steps=1 referee.steps=1 judge.steps=1
reward.batch.max_pairs=4 referee.batch.max_pairs=4 judge.batch.max_pairs=4
critic.max_rollouts=1 critic.batch_size=2 ppo.iterations=1 ppo.warmup_iterations=0 ppo.batch_size=2
ppo.max_new_tokens=4 ppo.ptx.batch_size=1 ppo.selection.prompts=2
evaluate.prompts=4 evaluate.kl_samples=2 evaluate.max_new_tokens=4 evaluate.sampling.max_new_tokens=12
evaluate.bootstrap=20 evaluate.perplexity.rows=4 evaluate.safety.prompts=1
"""
TRAINING = ("sft", "gate-sft", "reward", "referee", "judge", "gate-reward", "critic", "ppo")


@pytest.fixture
def workspace(tmp_path: Path, shared_data: Callable[[str], Path]) -> Path:
    """A workspace of the profile with a file of Chinese name, up to the starting model."""
    pairs = shutil.copy(shared_data("llama_factory_dpo_zh.json"), tmp_path / "偏好.json")
    folder = initialise(
        tmp_path / "run", "chinese-sample", [f"collect.files.preferences=[{pairs}]", *FEW.split()]
    )
    for stage in ("collect", "validate", "base"):
        run_stage(stage, folder)
    return folder


@pytest.mark.slow
def test_rows_are_kept_and_come_back_from_their_tokens(workspace: Path) -> None:
    numbers = json.loads((workspace / "metrics/data.json").read_text())["preferences"]
    assert numbers["raw"] == 300 and numbers["quarantined_share"] < 0.1
    tokenizer = load_tokenizer(workspace / "models/base")
    tokens = characters = 0
    for row in read_rows(workspace / "data/clean/preferences/train.parquet", Preference):
        prompt, reply = encode_dialogue(tokenizer, row.prompt, row.chosen)
        assert decode_reply(tokenizer, reply) == (row.chosen, True)
        tokens += len(prompt) + len(reply)
        characters += sum(len(turn.content) for turn in row.prompt) + len(row.chosen)
    assert tokens < 0.85 * characters  # bytes alone would be two to three a character


@pytest.mark.slow
def test_every_stage_runs_and_the_report_shows_chinese(workspace: Path) -> None:
    for stage in (*TRAINING, "evaluate", "gate-policy", "report"):
        run_stage(stage, workspace)
    assert 'lang="zh"' in (workspace / "report.html").read_text(encoding="utf-8")


SMALL = "collect.world.demonstrations=300 collect.world.preferences=400 collect.world.pretrain=60"
SMALL += " sft.steps=4 sft.batch_size=4 sft.samples=1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, and the tokenizer and chat template of SmolLM2."""
    assert SMOLLM2 is not None
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    tokenizer = AutoTokenizer.from_pretrained(
        str(SMOLLM2.parent), gguf_file=SMOLLM2.name, padding_side="left"
    )
    shape = SHAPE.model_copy(update={"max_positions": 512})
    save_policy(folder, new_model(shape, tokenizer, seed=1), tokenizer)
    return folder


@pytest.fixture(scope="module")
def prepared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace up to the base model."""
    workspace = tmp_path_factory.mktemp("workspace") / "run"
    initialise(workspace, None, [f"base.source={base}", *SMALL.split()])
    for stage in ("collect", "validate", "base"):
        run_stage(stage, workspace)
    return workspace


@needs_smollm2
@pytest.mark.slow
def test_a_sound_run_passes_the_gate(prepared: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "run"
    shutil.copytree(prepared, workspace)
    run_stage("sft", workspace)
    run_stage("gate-sft", workspace)
    metrics = json.loads((workspace / "metrics/sft.json").read_text())
    assert metrics["perplexity"] <= metrics["perplexity_before"]
    assert load_params(workspace).sft.optimizer.lr == 1e-5


@needs_smollm2
@pytest.mark.slow
def test_the_demos_learning_rate_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"sft\.optimizer\.lr 0\.003 \(about 1e-05\).*profile pretrained"
    ):
        initialise(tmp_path / "run", "own-data", [f"base.source={base}", "sft.optimizer.lr=3e-3"])
    assert not (tmp_path / "run" / "params.yaml").exists()


@needs_smollm2
@pytest.mark.slow
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

"""The profile for Chinese, in small: every stage on real Chinese pairs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.commands.init import initialise
from rlhf_core.data.encoding import decode_reply, encode_dialogue
from rlhf_core.data.schema import Preference, read_rows
from rlhf_core.models.starting.base import load_tokenizer
from rlhf_core.stages.runtime.runner import run_stage

pytestmark = pytest.mark.slow

FEW = [
    "base.hidden_size=32",
    "base.intermediate_size=48",
    "base.layers=1",
    "sft.steps=2",
    "sft.batch_size=2",
    "sft.samples=1",
    *(f"{model}.steps=1" for model in ("reward", "referee", "judge")),
    *(f"{model}.batch.max_pairs=4" for model in ("reward", "referee", "judge")),
    "critic.max_rollouts=1",
    "critic.batch_size=2",
    "ppo.iterations=1",
    "ppo.warmup_iterations=0",
    "ppo.batch_size=2",
    "ppo.max_new_tokens=4",
    "ppo.ptx.batch_size=1",
    "ppo.selection.prompts=2",
    "evaluate.prompts=4",
    "evaluate.kl_samples=2",
    "evaluate.max_new_tokens=4",
    "evaluate.sampling.max_new_tokens=12",
    "evaluate.bootstrap=20",
    "evaluate.perplexity.rows=4",
    "evaluate.safety.prompts=1",
]
TRAINING = ("sft", "gate-sft", "reward", "referee", "judge", "gate-reward", "critic", "ppo")


@pytest.fixture
def workspace(tmp_path: Path, shared_data: Callable[[str], Path]) -> Path:
    """A workspace of the profile with a file of Chinese name, up to the starting model."""
    pairs = shutil.copy(shared_data("llama_factory_dpo_zh.json"), tmp_path / "偏好.json")
    folder = initialise(tmp_path / "run", "chinese-sample", [f"collect.files.preferences=[{pairs}]", *FEW])
    for stage in ("collect", "validate", "base"):
        run_stage(stage, folder)
    return folder


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

"""Everything that samples takes the sampler of its settings, and gives its model's memory back."""

from __future__ import annotations

import gc
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlhf_core as rlhf
from rlhf_core.config.evaluation import EvaluateConfig, EvaluateStageConfig
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Prompt, write_rows
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.human_pairs import TRAINING_PROMPTS, sampled_candidates
from rlhf_core.evaluation.match import run_match
from rlhf_core.models.causal_lm import load_policy, load_tokenizer
from rlhf_core.sampling.sampler import LocalSampler

from .conftest import made_prompt
from .test_evaluate_stage import run_stage

WITHOUT_VLLM = {"kind": "vllm", "python": sys.executable}
EVALUATION = {"prompts": 4, "max_new_tokens": 5, "sampling": {"max_new_tokens": 5, "repetition_penalty": 1.0}}


def workspace(folder: Path, models: Path) -> Path:
    shutil.copytree(models, folder / "models")
    settings = EVALUATION | {"sampler": WITHOUT_VLLM}
    (folder / "params.yaml").write_text(f"seed: 1\nevaluate: {settings}\n")
    rows: list[Prompt] = [made_prompt(f"what is {i} and {i}?", "sums", "a file") for i in range(4)]
    for path in (Path("data/clean/prompts/test.parquet"), TRAINING_PROMPTS):
        write_rows(folder / path, rows)
    return folder


def pretrain_critic(folder: Path, models: Path) -> None:
    rlhf.train_critic(
        models / "sft", load_tokenizer(models / "sft"), ["is it red?"], lambda prompts, replies: [0.0 for _ in replies],
        rollout=rlhf.RolloutConfig.model_validate({"max_new_tokens": 5, "sampler": WITHOUT_VLLM}),
    )  # fmt: skip


def select(folder: Path, models: Path) -> None:
    """The first to sample in PPO with a referee, before any rollout."""
    settings = {"importance_sampling_correction": {"mode": "always"}, "sampler": WITHOUT_VLLM, "ptx": {"weight": 0.0}}
    without_critic = {"advantage": {"estimator": "rloo"}, "replies_per_prompt": 2, "critic_optimizer": None}
    config = rlhf.PpoConfig.model_validate({"max_new_tokens": 5} | settings | without_critic)
    rlhf.train_ppo(
        models / "sft", load_tokenizer(models / "sft"), ["is it red?"], lambda prompts, replies: [0.0 for _ in replies],
        referee=models / "referee", validation_prompts=["is it blue?"], config=config,
    )  # fmt: skip


def evaluate(folder: Path, models: Path) -> None:
    config = EvaluateStageConfig.model_validate(EVALUATION | {"sampler": WITHOUT_VLLM})
    run_stage(folder, models, [made_prompt("is it red?", "fact", "a file")], config)


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "critic pre-training": pretrain_critic,
    "selection": select,
    "evaluation": evaluate,
    "match": lambda folder, models: run_match(workspace(folder, models), models / "sft", models / "policy"),
    "annotation": lambda folder, models: sampled_candidates(workspace(folder, models), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_whatever_samples_takes_the_sampler_of_its_settings(name: str, tmp_path: Path, models: Path) -> None:
    """This Python has no vLLM, so that each ends with what the server says."""
    with pytest.raises(RlhfError, match=r"vLLM's server ended with status 1; .*No module named") as raised:
        CALLS[name](tmp_path, models)
    assert "\n" not in str(raised.value)


def test_a_sampler_lets_go_of_its_model(models: Path) -> None:
    sampler, model = LocalSampler(), load_policy(models / "sft")[0]
    sampler.sync(model, 0)
    kept = weakref.ref(model)
    del model
    sampler.release()
    gc.collect()
    assert kept() is None
    with pytest.raises(RlhfError, match="no weights"), sampler.awake(0, 1, 1):
        raise AssertionError("it woke up")


def test_a_repetition_penalty_that_the_server_counts_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set that to 1\.0, or sampler\.kind to local"):
        EvaluateConfig.model_validate({"sampler": WITHOUT_VLLM, "sampling": {"repetition_penalty": 1.1}})
    EvaluateConfig(sampling=SamplingConfig(repetition_penalty=1.0))

"""``python -m benchmarks.against_trl.ours FOLDER``: runs of this project's trainers, one per line
of input.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import rlhf_core
from benchmarks.against_trl.workload import (
    ENDLESS,
    EOS,
    GROUP,
    LONGEST,
    PAD,
    TRAININGS,
    EndOfInput,
    Stopwatch,
    Workload,
    ranks,
)
from benchmarks.random_models import bare_trainer
from rlhf_core.config.policy import DpoConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.rates import with_chosen_rates
from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.kernels import use_kernels
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.ppo.actor_critic import build_actor_critic
from rlhf_core.ppo.reward_sources.source import reward_model_fn
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner
from rlhf_core.runtime.distributed import device, process_group
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.training.run_context import RunContext

HELD_OUT = 2  # rows that the evaluations before and after training read


def main() -> int:
    """Load the models, and train or make iterations until the input ends."""
    folder = Path(sys.argv[1])
    workload = Workload.read(folder)
    with (
        ranks(workload.processes),
        suppress(EndOfInput),
        tempfile.TemporaryDirectory() as work,
        process_group(),
    ):
        if workload.method in TRAININGS:
            run = _training(workload, folder)
        else:
            run = _trainer(workload, folder, Path(work)).iterate
        Stopwatch().repeat(run)
    return 0


def _training(workload: Workload, folder: Path) -> Callable[[], object]:
    """A whole training, from texts in memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    data, rows = json.loads((folder / "rows.json").read_text()), workload.rows
    given: dict[str, Any] = {
        "steps": workload.steps,
        "max_tokens": LONGEST,
        "eval_every": workload.steps,
    }
    if workload.method == "sft":
        sft = rlhf_core.SftConfig(batch_size=rows, **given)
        return partial(
            rlhf_core.train_sft, model, tokenizer, data, validation=data[:HELD_OUT], config=sft
        )
    if workload.method == "reward":
        batch = PairBatchConfig(token_budget=2 * rows * LONGEST, min_pairs=rows, max_pairs=rows)
        reward = rlhf_core.RewardConfig(
            imitation=0.0, batch=batch, **given
        )  # TRL has no loss on the chosen replies
        return partial(
            rlhf_core.train_reward_model,
            model,
            tokenizer,
            data,
            validation=data[:HELD_OUT],
            config=reward,
        )
    dpo = DpoConfig(batch_size=rows, **given)
    return partial(
        rlhf_core.train_dpo, model, tokenizer, data, validation=data[:HELD_OUT], config=dpo
    )


def _trainer(workload: Workload, folder: Path, work: Path) -> Trainer:
    """A run without ptx texts, referee and checkpoints, which TRL does not have either."""
    with_critic = workload.method == "ppo"
    group = {
        "replies_per_prompt": GROUP,
        "advantage": {"estimator": workload.method},
        "critic_optimizer": None,
    }
    settings = PpoConfig.model_validate(
        {
            **({} if with_critic else group),
            "iterations": ENDLESS,
            "batch_size": workload.replies,
            "minibatches": workload.minibatches,
            "epochs": workload.epochs,
            "micro_batch_size": workload.replies // workload.minibatches,
            "micro_batch_tokens": None,
            "max_new_tokens": workload.reply,
            "min_new_tokens": workload.reply - 1,
            "warmup_iterations": 0,
            "importance_sampling_correction": {"mode": "ratio"},
            "ptx": {"weight": 0.0},
            "checkpoint": {"every": ENDLESS},
            "health": {"mode": "report"},
        }
    )
    config = with_chosen_rates(settings, new=True)
    dtype = getattr(torch, workload.dtype)
    policy, reference = (
        LlamaForCausalLM.from_pretrained(folder / "policy", dtype=dtype).eval() for _ in range(2)
    )
    value, reward = (
        ScalarModel(
            LlamaForSequenceClassification.from_pretrained(folder / name, dtype=dtype).eval()
        )
        for name in ("value", "reward")
    )
    for model in (policy, reference):
        use_float32_unembedding(model)
    for model in (policy, reference, value, reward):
        use_kernels(model)  # as loading a folder with a tokenizer does
    for model in (reference, reward):  # engines place what is trained
        model.to(device())
    sampling = Sampling(EOS, PAD, workload.reply, min_new_tokens=workload.reply)
    pair = build_actor_critic(
        config, policy, value if with_critic else None, sampling, RunContext(work)
    )
    learner = Learner(config, pair, reference)
    reward_fn = reward_model_fn(reward, MicroBatchLimits(workload.replies // workload.minibatches))
    return bare_trainer(learner, reward_fn, workload.prompt_ids(), RunContext(work))


if __name__ == "__main__":
    sys.exit(main())

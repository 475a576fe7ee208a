"""``python -m benchmarks.ppo_iteration.ours FOLDER``: iterations of this project's trainer, one per line of input."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.ppo_iteration.workload import EOS, GROUP, PAD, EndOfInput, Stopwatch, Workload, ranks
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.schema import Message
from rlhf_core.models.fused_norms import fuse_norms
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.openblas_linear import use_openblas
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.ppo.actor_critic import build_actor_critic
from rlhf_core.ppo.reward_sources.source import reward_model_fn
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner
from rlhf_core.runtime.distributed import process_group
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.training.run_context import RunContext

ITERATIONS = 10_000  # more than are asked for


def main() -> int:
    """Load the models, and make iterations until the input ends."""
    folder = Path(sys.argv[1])
    workload = Workload.read(folder)
    with ranks(workload.processes), suppress(EndOfInput), tempfile.TemporaryDirectory() as work, process_group():
        Stopwatch().repeat(_trainer(workload, folder, Path(work)).iterate)
    return 0


def _trainer(workload: Workload, folder: Path, work: Path) -> Trainer:
    """A run without ptx texts, referee and checkpoints, which TRL does not have either."""
    with_critic = workload.method == "ppo"
    group = {"replies_per_prompt": GROUP, "advantage": {"estimator": workload.method}, "critic_optimizer": None}
    config = PpoConfig.model_validate(
        {
            **({} if with_critic else group),
            "iterations": ITERATIONS,
            "batch_size": workload.replies,
            "minibatches": workload.minibatches,
            "epochs": workload.epochs,
            "micro_batch_size": workload.replies // workload.minibatches,
            "micro_batch_tokens": None,
            "max_new_tokens": workload.reply,
            "min_new_tokens": workload.reply - 1,
            "warmup_iterations": 0,
            "ptx": {"weight": 0.0},
            "checkpoint": {"every": ITERATIONS},
            "health": {"mode": "report"},
        }
    )
    dtype = getattr(torch, workload.dtype)
    policy, reference = (LlamaForCausalLM.from_pretrained(folder / "policy", dtype=dtype).eval() for _ in range(2))
    value, reward = (
        ScalarModel(LlamaForSequenceClassification.from_pretrained(folder / name, dtype=dtype).eval())
        for name in ("value", "reward")
    )
    for model in (policy, reference):
        use_float32_unembedding(model)
    for model in (policy, reference, value, reward):
        use_openblas(model)  # as loading a folder with a tokenizer does, and so the norms
        fuse_norms(model)
    sampling = Sampling(EOS, PAD, workload.reply, min_new_tokens=workload.reply)
    pair = build_actor_critic(config, policy, value if with_critic else None, sampling, RunContext(work))
    ids = workload.prompt_ids()
    return Trainer(
        learner=Learner(config, pair, reference),
        reward_fn=reward_model_fn(reward, MicroBatchLimits(workload.replies // workload.minibatches)),
        prompts=TrainingPrompts([[Message("user", str(row))] for row in range(len(ids))], ids),
        decode=lambda ids: " ".join(map(str, ids)),
        moments=RunningMeanStd(),
        context=RunContext(work),
    )


if __name__ == "__main__":
    sys.exit(main())

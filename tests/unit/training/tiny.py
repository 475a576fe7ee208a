"""A tiny model, tokenizer and rows for tests of training, and a training stage to kill."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from rlhf_core.config.base import BaseConfig, SftConfig
from rlhf_core.config.model import CheckpointConfig, OptimizerConfig
from rlhf_core.config.policy import CriticStageConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.schema import Demonstration, Message, Preference, Prompt, write_rows
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.starting.base import new_model, save_policy, train_tokenizer
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.stages import critic, reward, sft
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training.run_context import RunContext

WORDS = ("red", "blue", "green", "the sky", "a tree", "very", "is", "big", "small", "near")
SHAPE = BaseConfig(vocab_size=300, hidden_size=16, intermediate_size=24, layers=1, heads=2, max_positions=128)
CHECKPOINT = CheckpointConfig(every=3)
STEPS = 8


def text(seed: int, words: int) -> str:
    """Some words, a function of ``seed``."""
    return " ".join(WORDS[(seed * 7 + i * (seed % 3 + 1)) % len(WORDS)] for i in range(words))


def demonstrations(n: int) -> list[Demonstration]:
    """Rows of mixed length."""
    return [
        Demonstration(str(i), [Message("user", text(i, 1 + i % 4))], text(i + 3, 1 + i % 7), "fact", "test", str(i))
        for i in range(n)
    ]


def preferences(n: int) -> list[Preference]:
    """Pairs of mixed length whose chosen reply says "good"."""
    return [
        Preference(
            str(i), [Message("user", text(i, 1 + i % 4))], f"good {text(i, i % 5)}", f"bad {text(i + 1, i % 6)}",
            None, ("fact", "howto")[i % 2], "test", str(i),
        )
        for i in range(n)
    ]  # fmt: skip


def prompts(n: int) -> list[Prompt]:
    """Prompts of mixed length."""
    return [Prompt(str(i), [Message("user", text(i, 1 + i % 4))], "fact", "test", str(i)) for i in range(n)]


def make_workspace(root: Path) -> None:
    """Clean data, a base model that serves as SFT too, and a reward model with a random head, under ``root``."""
    for split, n in (("train", 60), ("validation", 20), ("test", 20)):
        write_rows(root / "data/clean/demonstrations" / f"{split}.parquet", demonstrations(n))
        write_rows(root / "data/clean/preferences" / f"{split}.parquet", preferences(n))
        write_rows(root / "data/clean/prompts" / f"{split}.parquet", prompts(n))
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    for name in ("base", "sft"):
        save_policy(root / "models" / name, new_model(SHAPE, tokenizer, seed=1), tokenizer)
    ScalarModel.from_causal_lm(root / "models/base", seed=2).save(root / "models/reward", tokenizer)


def run_stage(name: str, root: Path, out: str, preemption: PreemptionSignal | None = None) -> dict[str, object]:
    """Run a training stage on the workspace, its outputs under ``root/out`` and its partial state beside them."""
    optimizer = OptimizerConfig(lr=1e-2)
    cases: dict[str, tuple[Stage[Any], Any]] = {
        "sft": (
            sft.STAGE,
            SftConfig(
                steps=STEPS, batch_size=8, micro_batch_size=3, eval_every=4, samples=2, optimizer=optimizer,
                checkpoint=CHECKPOINT,
            ),
        ),
        "reward": (
            reward.STAGE,
            RewardConfig(
                init="base", steps=STEPS, batch=PairBatchConfig(token_budget=200), eval_every=4, optimizer=optimizer,
                checkpoint=CHECKPOINT,
            ),
        ),
        "critic": (
            critic.STAGE,
            CriticStageConfig(
                max_rollouts=5, batch_size=8, explained_variance=1.0, optimizer=optimizer,
                checkpoint=CheckpointConfig(every=2), ppo=PpoConfig(max_new_tokens=6),
            ),
        ),
    }  # fmt: skip
    stage, config = cases[name]
    inputs = Paths({key: root / path for key, path in stage.inputs.items()})
    outputs = {key: root / out / path for key, path in stage.outputs.items()}
    for path in outputs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    context = RunContext(root / out / "work", preemption=preemption or PreemptionSignal())
    return dict(stage.run(config, inputs, Paths(outputs), context))


def kill_after(step: int, checkpoint: Path) -> None:
    """SIGKILL this process in the middle of optimiser step ``step``: after the gradients, before the update, and when
    ``checkpoint`` is on the disk."""
    from rlhf_core.training.engine import LocalEngine

    original = LocalEngine.step

    def step_or_die(engine: LocalEngine) -> object:
        if engine.steps == step:
            while not checkpoint.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(engine)

    LocalEngine.step = step_or_die  # type: ignore[method-assign]


def run_and_die(name: str, root: Path, out: str, step: int, checkpoint: str) -> None:
    """:func:`run_stage` in a process that :func:`kill_after` ends."""
    kill_after(step, root / out / "work/checkpoints" / checkpoint)
    run_stage(name, root, out)

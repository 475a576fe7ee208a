"""A tiny model, tokenizer and rows for tests of training, and a training stage to kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from clean_files import write_rows

from rlhf_core.config.base import BaseConfig, SftConfig
from rlhf_core.config.model import CheckpointConfig, OptimizerConfig
from rlhf_core.config.policy import CriticStageConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.schema import Demonstration, Message, Preference, Prompt
from rlhf_core.models.causal_lm import new_model, save_policy, train_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.stages import critic, reward, sft
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training.engine.base import LocalEngine, StepResult
from rlhf_core.training.history import CLOCK_FIELDS, read_history
from rlhf_core.training.run_context import RunContext

WORDS = ("red", "blue", "green", "the sky", "a tree", "very", "is", "big", "small", "near")
SHAPE = BaseConfig(
    vocab_size=300, hidden_size=16, intermediate_size=24, layers=1, heads=2, max_positions=128
)
CHECKPOINT = CheckpointConfig(every=3)
STEPS = 8
PARAMS = """
seed: 3
sft: {steps: 8, batch_size: 7, micro_batch_size: 2, eval_every: 4, samples: 2, checkpoint: {every: 3},
      optimizer: {lr: 0.01}}
"""


def text(seed: int, words: int) -> str:
    """Some words, a function of ``seed``."""
    return " ".join(WORDS[(seed * 7 + i * (seed % 3 + 1)) % len(WORDS)] for i in range(words))


def demonstrations(n: int) -> list[Demonstration]:
    """Rows of mixed length."""
    return [
        Demonstration(
            str(i),
            [Message("user", text(i, 1 + i % 4))],
            text(i + 3, 1 + i % 7),
            "fact",
            "test",
            str(i),
        )
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
    return [
        Prompt(str(i), [Message("user", text(i, 1 + i % 4))], "fact", "test", str(i))
        for i in range(n)
    ]


def make_workspace(root: Path) -> None:
    """Clean data, a base model that serves as SFT too, and a reward model with a random head, under
    ``root``.
    """
    for split, n in (("train", 60), ("validation", 20), ("test", 20)):
        write_rows(root / "data/clean/demonstrations" / f"{split}.parquet", demonstrations(n))
        write_rows(root / "data/clean/preferences" / f"{split}.parquet", preferences(n))
        write_rows(root / "data/clean/prompts" / f"{split}.parquet", prompts(n))
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    for name in ("base", "sft"):
        save_policy(root / "models" / name, new_model(SHAPE, tokenizer, seed=1), tokenizer)
    ScalarModel.from_causal_lm(root / "models/base", seed=2).save(root / "models/reward", tokenizer)


def stage_paths(stage: Stage[Any], root: Path, out: Path, **inputs: Path) -> tuple[Paths, Paths]:
    """Inputs of a stage from ``root`` or as they are given, and its outputs under ``out``, with the
    folders that the runner makes."""
    outputs = {key: out / path for key, path in stage.outputs.items()}
    for path in outputs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    return Paths({key: root / path for key, path in stage.inputs.items()} | inputs), Paths(outputs)


def without_clock(history: Path) -> list[dict[str, Any]]:
    """The rows of a history without the fields in which alone a resumed run may differ from an
    uninterrupted one.
    """
    return [
        {
            name: value
            for name, value in row.items()
            if name not in CLOCK_FIELDS and not name.startswith("seconds_")
        }
        for row in read_history(history)
    ]


def run_stage(
    name: str, root: Path, out: str, preemption: PreemptionSignal | None = None
) -> dict[str, object]:
    """Run a training stage on the workspace, its outputs under ``root/out`` and its partial state
    beside them.
    """
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
    context = RunContext(root / out / "work", preemption=preemption or PreemptionSignal())
    return dict(stage.run(config, *stage_paths(stage, root, root / out), context))


def at_step(step: int, action: Callable[[], object]) -> Callable[[LocalEngine], StepResult]:
    """An engine's step amid which ``action`` happens, if it is this one: after the gradients,
    before the update.
    """
    original = LocalEngine.step

    def step_with_action(engine: LocalEngine) -> StepResult:
        if engine.steps == step:
            action()
        return original(engine)

    return step_with_action


def die_behind(checkpoint: str, folder: Path) -> None:
    """Have this process killed as soon as a checkpoint is somewhere under ``folder``."""
    while not list(folder.rglob(f"checkpoints/{checkpoint}")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(name: str, root: Path, out: str, step: int, checkpoint: str) -> None:
    """:func:`run_stage` in a process that is killed amid a step, behind a checkpoint."""
    dying = at_step(step, partial(die_behind, checkpoint, root / out / "work"))
    LocalEngine.step = dying  # type: ignore[assignment,method-assign]
    run_stage(name, root, out)

"""Sums with their answers, a function that checks replies, and a tiny model that hedges in half of
its replies.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from rlhf_core.api.sft import train_sft
from rlhf_core.config.base import BaseConfig, SftConfig
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.models.causal_lm import new_model, train_tokenizer

SUMS = [(a, b) for a in range(10) for b in range(20)]
CHECKS = '''
def score(prompts, replies, answer):
    """1 for the right sum, else 0."""
    return [float(reply.strip() == right) for reply, right in zip(replies, answer)]


def constant(prompts, replies):
    return [1.0] * len(replies)
'''
# A short run of a model this small; what else there is stays as the profile has it.
SETTINGS = (
    "base.allow_high_learning_rates=true",
    "ppo.iterations=8",
    "ppo.max_new_tokens=8",
    "ppo.policy_optimizer.lr=1e-3",
    "ppo.kl.coefficient=0.01",
    "evaluate.max_new_tokens=8",
    "evaluate.sampling.max_new_tokens=8",
    "evaluate.perplexity.rows=0",
    "validate.split.test=0.3",
    "pools={}",
    "compute.threads=1",
)


def question(a: int, b: int) -> str:
    return f"{a} + {b} ="


def write_sums(folder: Path) -> None:
    """Write ``sums.jsonl``, ``checks.py`` and the folder ``tiny`` of the model."""
    records = [{"prompt": question(a, b), "answer": str(a + b)} for a, b in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "checks.py").write_text(CHECKS)
    draw = random.Random(1)
    # The model knows sums, and says "about 5" as often as "5", which is no answer.
    dialogues = [
        {"prompt": question(a, b), "completion": draw.choice(["", "about "]) + str(a + b)}
        for a, b in SUMS
        for _ in range(4)
    ]
    tokenizer = train_tokenizer(
        [f"{row['prompt']} {row['completion']}" for row in dialogues], 300, 64
    )
    shape = BaseConfig(hidden_size=64, intermediate_size=128, layers=2, heads=4, max_positions=64)
    settings = SftConfig(
        steps=350, batch_size=64, max_tokens=32, eval_every=350, optimizer=OptimizerConfig(lr=6e-3)
    )
    trained = train_sft(
        new_model(shape, tokenizer, seed=1),
        tokenizer,
        dialogues,
        config=settings,
        allow_high_learning_rates=True,
    )
    trained.save(folder / "tiny")


def init_words(name: str) -> list[str]:
    """The words of ``rlhf init`` that make the workspace ``name`` of them."""
    words = [
        "init",
        name,
        "--prompts",
        "sums.jsonl",
        "--reward",
        "checks.py:score",
        "--model",
        "./tiny",
    ]
    for setting in SETTINGS:
        words += ["--set", setting]
    return words

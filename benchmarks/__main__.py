"""``make bench``: sampling and training of the demo's model, then trainings beside TRL's; the
ratios come last.

Prompts and replies are random tokens of the demo's lengths.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.against_trl import __main__ as against_trl
from benchmarks.harness import announce, matmul_flops, seconds
from benchmarks.sampling import sample_ours, sample_theirs
from rlhf_core.config.base import BaseConfig
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.models.causal_lm import new_model, train_tokenizer
from rlhf_core.models.io import quiet
from rlhf_core.training.engine.base import LocalEngine
from rlhf_core.training.examples import Example
from rlhf_core.training.sft import example_batch, reply_loss
from rlhf_core.world.corpus import demonstrations

BATCH, PROMPT, REPLY = 64, 14, 32


def main() -> None:
    """Measure with the threads torch was given, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--trl-python",
        type=Path,
        help="the Python of an environment with TRL; without it, ours alone",
    )
    parser.add_argument(
        "--quick", action="store_true", help="once and small: is this command itself in order?"
    )
    given = parser.parse_args()
    with quiet():
        ratios = _of_the_demo()
        if given.trl_python:
            small = (
                "--repeats",
                "1",
                "--steps",
                "2",
                "--size",
                "0.43 M",
                "--reply",
                "8",
                "--cores",
                "1x1",
            )
            print()
            against = against_trl.main(
                ["--trl-python", str(given.trl_python), *(small if given.quick else ())]
            )
            ratios += [
                f"{ratio:.2f} times as fast as TRL: {what}" for what, ratio in against.items()
            ]
    print("\nratios", *ratios, sep="\n")


def _of_the_demo() -> list[str]:
    """Sampling beside ``generate``, and a training step beside the limit of matrix products;
    returns both ratios.
    """
    rows = demonstrations(0, 2000)
    tokenizer = train_tokenizer([row["reply"] for row in rows], 1024)
    model = new_model(BaseConfig(), tokenizer, seed=0)
    parameters = sum(p.numel() for p in model.parameters())
    prompts = [[5 + (i + j) % 500 for j in range(PROMPT)] for i in range(BATCH)]

    announce("the limit of matrix products")
    limit = matmul_flops()
    print(f"threads {torch.get_num_threads()}, matmul limit {limit / 1e9:.0f} GFLOP/s")
    print(f"model       {parameters / 1e6:8.2f} M parameters", flush=True)
    announce("sampling")
    ours = seconds(lambda: sample_ours(model, torch.tensor(prompts), REPLY))
    print(f"generation  {BATCH * REPLY / ours:8.0f} tokens/s", flush=True)
    announce("transformers' generate")
    theirs = seconds(lambda: sample_theirs(model, torch.tensor(prompts), REPLY))
    announce("training")
    step = seconds(_training_step(model, prompts), 10)
    tokens = BATCH * (PROMPT + REPLY)
    print(f"training    {tokens / step:8.0f} tokens/s", flush=True)
    # Forward and backward of a dense transformer: six operations per parameter and token (Kaplan et
    # al., 2020).
    share = tokens / step * 6 * parameters / limit
    return [
        f"{theirs / ours:.2f} times as fast as transformers' generate: sampling",
        f"{share:.0%} of the matmul limit: training",
    ]


def _training_step(model: torch.nn.Module, prompts: list[list[int]]):  # type: ignore[no-untyped-def]
    engine = LocalEngine(model, OptimizerConfig(lr=1e-4), total_steps=1000)
    examples = [Example(prompt, [7 + j for j in range(REPLY)]) for prompt in prompts]
    batch = example_batch(examples, 0, torch.device("cpu"))

    def step() -> None:
        engine.backward(reply_loss(model, batch, BATCH * REPLY))  # type: ignore[arg-type]
        engine.step()

    return step


if __name__ == "__main__":
    main()

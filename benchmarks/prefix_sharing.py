"""``python -m benchmarks.prefix_sharing``: what computing a prompt once saves of a reward model's step.

Pairs of random tokens, with prompts and replies of about the given lengths, pass a random model forward and backward,
with both sequences of a pair apart and with both replies behind one prompt, in turn. Printed are, for each length of
prompts, the positions computed, padding included, and processor milliseconds: medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.batches import least_padded
from rlhf_core.data.pairs import TokenisedPair
from rlhf_core.models.heads import ScalarModel
from rlhf_core.training.losses import StepTotals
from rlhf_core.training.reward.trainer import pair_loss, row_lengths

HEAD_WIDTH = 64
PAD = 0


def main() -> int:
    """Measure, print one table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_sharing", description=__doc__)
    parser.add_argument("--hidden", type=int, default=256, help=f"width of the model, a multiple of {HEAD_WIDTH}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--prompts", type=int, nargs="+", default=[20, 50, 100, 200, 400], help="tokens of a prompt")
    parser.add_argument("--reply", type=int, default=50, help="tokens of a reply")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = random_reward_model(given.hidden, given.layers, given.vocabulary)
    print("prompt   positions: apart  shared  ratio   ms: apart  shared  ratio")
    for prompt in given.prompts:
        pairs = random_pairs(given.pairs, prompt, given.reply, given.vocabulary)
        settings = [PairBatchConfig(prefix_sharing=shared) for shared in (False, True)]
        positions = [least_padded([row_lengths(pairs, batch)], batch.max_padding)[0].computed for batch in settings]
        times: list[list[float]] = [[], []]
        for _ in range(given.repeats + 1):
            for taken, batch in zip(times, settings, strict=True):
                taken.append(step_milliseconds(model, pairs, batch))
        apart, shared = (statistics.median(taken[1:]) for taken in times)
        print(
            f"{prompt:6d} {positions[0]:17d} {positions[1]:7d} {positions[1] / positions[0]:6.2f} "
            f"{apart:11.1f} {shared:7.1f} {shared / apart:6.2f}",
            flush=True,
        )
    return 0


def random_reward_model(hidden: int, layers: int, vocabulary: int) -> ScalarModel:
    """A Llama with random weights and a scalar head."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_WIDTH,
    )
    return ScalarModel.from_causal_lm(LlamaForCausalLM(shape), seed=0)


def random_pairs(count: int, prompt: int, reply: int, vocabulary: int) -> list[TokenisedPair]:
    """Pairs of random tokens; lengths spread evenly, from half to one and a half of what is given."""
    draw = random.Random(0)

    def ids(length: int) -> list[int]:
        return draw.choices(range(1, vocabulary), k=draw.randint(length // 2, length * 3 // 2))

    return [TokenisedPair(i, ids(prompt), ids(reply), ids(reply)) for i in range(count)]


def step_milliseconds(model: ScalarModel, pairs: list[TokenisedPair], batch: PairBatchConfig) -> float:
    """Processor milliseconds of the loss and its gradients, batches made included."""
    start = time.process_time()
    (rows,) = least_padded([row_lengths(pairs, batch)], batch.max_padding)
    totals = StepTotals(len(pairs), sum(len(pair.chosen) for pair in pairs))
    loss, _ = pair_loss(model, pairs, None, RewardConfig(batch=batch), PAD, totals, rows.micro_batches)
    loss.backward()
    model.zero_grad()
    return 1000 * (time.process_time() - start)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.padding WORKSPACE``: padding in PPO's passes, by rows and by budgets of tokens.

Batches are drawn from the demonstrations of a workspace whose stages have run up to ``base``, as prompts with replies
of the lengths that people wrote. Nothing is computed with them but their padding. Printed are the shares of padding in
scoring a batch and in the updates on its two minibatches, and the number of passes of an update.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch

from rlhf_core.data.encoding import encode_dialogue
from rlhf_core.data.schema import Demonstration, read_rows
from rlhf_core.models.starting.base import load_tokenizer
from rlhf_core.sampling.micro_batches import MicroBatchLimits
from rlhf_core.sampling.token_scoring import Tokens

BATCHES = 50


def main() -> int:
    """Measure, print one table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padding", description=__doc__)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--rows", type=int, default=64, help="replies of a batch")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.workspace / "models" / "base")
    rows = read_rows(given.workspace / "data" / "clean" / "demonstrations" / "train.parquet", Demonstration)
    draw = random.Random(0)
    batches = []
    for _ in range(BATCHES):
        chosen = [encode_dialogue(tokenizer, row.prompt, row.reply) for row in draw.sample(rows, given.rows)]
        batches.append(replies([(len(prompt), len(reply)) for prompt, reply in chosen]))
    print(f"{'':<24} scoring   update   passes")
    settings = {"16 rows": MicroBatchLimits()}
    settings |= {f"{budget} tokens": MicroBatchLimits(tokens=budget) for budget in given.budgets}
    for name, limits in settings.items():
        halves = [
            Tokens(b.tokens[part::2], b.attention_mask[part::2], b.response_mask[part::2])
            for b in batches
            for part in range(2)
        ]
        scoring, update = (sum(map(limits.padding_share, some)) / len(some) for some in (batches, halves))
        passes = sum(len(list(limits.split(half))) for half in halves) / len(halves)
        print(f"{name:<24} {scoring:7.3f} {update:8.3f} {passes:8.1f}")
    return 0


def replies(lengths: list[tuple[int, int]]) -> Tokens:
    """A batch of prompts and replies of these lengths."""
    prompts, answers = (torch.tensor(column).unsqueeze(1) for column in zip(*lengths, strict=True))
    prompt, reply = int(prompts.max()), int(answers.max())
    before = torch.arange(prompt).unsqueeze(0) >= prompt - prompts
    after = torch.arange(reply).unsqueeze(0) < answers
    attention = torch.cat((before, after), dim=1).long()
    return Tokens(torch.zeros_like(attention), attention, after)


if __name__ == "__main__":
    sys.exit(main())

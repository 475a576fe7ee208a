"""``python -m benchmarks.padding_time WORKSPACE``: what less padding saves in PPO's passes of the policy.

Prompts are drawn from a workspace whose stages have run up to ``sft``; replies are random tokens, more than half of
them as long as may be. The policy has adapters on its upper layers. Printed are, for passes by rows and by budgets of
tokens in turn, the share of padding and the processor seconds of scoring the batch, entropies included, and of the
passes of a policy update.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.padding import replies
from rlhf_core.config.model import LoraConfig
from rlhf_core.data.encoding import encode_prompt
from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.models.adapters import add_adapters
from rlhf_core.models.starting.base import load_policy
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.micro_batches import MicroBatchLimits
from rlhf_core.sampling.token_scoring import DistributionScorer, Tokens, response_logits


def main() -> int:
    """Measure, print one table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padding_time", description=__doc__)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--batch", type=int, default=24, help="replies of a batch")
    parser.add_argument("--reply", type=int, default=96, help="most tokens of a reply")
    parser.add_argument("--rows", type=int, default=8, help="rows of a pass")
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048])
    parser.add_argument("--upper-layers", type=int, default=10, help="layers with adapters")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    policy, tokenizer = load_policy(given.workspace / "models" / "sft")
    add_adapters(policy, LoraConfig(upper_layers=given.upper_layers), seed=0)
    prompts = list(read_rows(given.workspace / "data" / "clean" / "prompts" / "train.parquet", Prompt))
    draw = random.Random(0)
    lengths = [
        (
            len(encode_prompt(tokenizer, row.prompt)),
            given.reply if draw.random() < 0.55 else draw.randint(8, given.reply),
        )
        for row in draw.sample(prompts, given.batch)
    ]
    batch = replies(lengths)
    batch.tokens.random_(0, len(tokenizer), generator=torch.Generator().manual_seed(0))
    scorer = DistributionScorer(Sampling.for_tokenizer(tokenizer, given.reply))

    settings = {f"{given.rows} rows": MicroBatchLimits(given.rows)}
    settings |= {f"{budget} tokens": MicroBatchLimits(tokens=budget) for budget in given.budgets}
    print(f"{sum(map(sum, lengths))} tokens\n{'':<14} padding   scoring   update", flush=True)
    for name, limits in settings.items():
        scoring = processor_seconds(partial(score, policy, scorer, batch, limits))
        update = processor_seconds(partial(differentiate, policy, scorer, batch, limits))
        print(f"{name:<14} {limits.padding_share(batch):7.3f} {scoring:9.1f} {update:8.1f}", flush=True)
    return 0


def processor_seconds(run: Callable[[], None]) -> float:
    """Processor seconds of the process while ``run`` runs."""
    start = time.process_time()
    run()
    return time.process_time() - start


@torch.inference_mode()
def score(policy: PreTrainedModel, scorer: DistributionScorer, batch: Tokens, limits: MicroBatchLimits) -> None:
    """Compute log-probabilities and entropies of the replies."""
    for micro in limits.split(batch):
        scorer.score(response_logits(policy, micro.tokens), micro.tokens, entropies=True)


def differentiate(policy: PreTrainedModel, scorer: DistributionScorer, batch: Tokens, limits: MicroBatchLimits) -> None:
    """Compute the adapters' gradients of the mean log-probability, and drop them."""
    for micro in limits.split(batch):
        logprobs = scorer.score(response_logits(policy, micro.tokens), micro.tokens).logprobs
        (-logprobs[micro.tokens.response_mask].sum() / batch.response_mask.sum()).backward()
    policy.zero_grad(set_to_none=True)


if __name__ == "__main__":
    sys.exit(main())

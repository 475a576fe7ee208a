"""``python -m benchmarks.sampling FOLDER``: our sampler beside transformers' ``generate`` and vLLM,
in turn.

All sample replies of one length from the whole distribution at temperature 1. Adapters, where asked
for, have random weights. Threads sleep between products, or spin, in all three, where
GOMP_SPINCOUNT is set. Printed are the median tokens per second of wall time and of processor time,
and how many times those of the others ours are. vLLM, where the Python of its environment is given,
is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Run, in_turn, worker
from rlhf_core.config.model import LoraConfig
from rlhf_core.models.adapters import add_adapters
from rlhf_core.models.io import load_model
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, sample_replies

VLLM_PROGRAM = Path(__file__).with_name("sampling_by_vllm.py")
ANSWER = "seconds: "


def main() -> int:
    """Measure with the threads that were asked for, print one table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="a Hugging Face folder of a causal language model"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="adapters on all linear layers; 0: none"
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--reply", type=int, default=64, help="tokens of each reply")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm-python", type=Path, help="the Python of an environment with vLLM")
    given = parser.parse_args()
    if given.vllm_python and given.lora_rank:
        parser.error("--vllm-python takes no adapters: leave out --lora-rank")
    torch.set_num_threads(given.threads)

    dtype = getattr(torch, given.dtype)
    ours: Any = load_model(AutoModelForCausalLM, given.folder, dtype)
    theirs: Any = (
        AutoModelForCausalLM.from_pretrained(given.folder, dtype=dtype).to(ours.device).eval()
    )
    if given.lora_rank:
        for model in (ours, theirs):
            _add_random_adapters(model, given.lora_rank)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        5, ours.config.vocab_size, (given.rows, given.prompt), generator=generator
    )

    runs: dict[str, Run] = {
        "rlhf": partial(_timed, lambda: sample_ours(ours, prompts, given.reply)),
        "transformers": partial(_timed, lambda: sample_theirs(theirs, prompts, given.reply)),
    }
    with ExitStack() as stack:
        if given.vllm_python:
            command = list(
                map(str, (given.vllm_python, VLLM_PROGRAM, given.folder, given.dtype, given.reply))
            )
            environment, asked = (
                os.environ | {"OMP_NUM_THREADS": str(given.threads)},
                json.dumps(prompts.tolist()),
            )
            runs["vllm"] = stack.enter_context(worker(command, ANSWER, environment, first=asked))
        in_turn(list(runs.values()), 1)  # warms up
        seconds = dict(zip(runs, in_turn(list(runs.values()), given.repeats), strict=True))
    tokens = given.rows * given.reply
    print(
        f"{given.folder.name}, {given.dtype}, adapters of rank {given.lora_rank}, {given.rows} x {given.reply} tokens"
    )
    print(
        f"threads {given.threads}       wall tokens/s   tokens per processor second   ours: times as many"
    )
    for name, (wall, processor) in seconds.items():
        ratios = (
            f"{wall / seconds['rlhf'][0]:9.2f}, {processor / seconds['rlhf'][1]:.2f}"
            if name != "rlhf"
            else ""
        )
        print(f"{name:<15} {tokens / wall:14.0f} {tokens / processor:29.0f} {ratios}")
    return 0


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def _add_random_adapters(model: Any, rank: int) -> None:
    add_adapters(model, LoraConfig(rank=rank, alpha=2 * rank), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.01 * torch.randn(parameter.shape, generator=generator))


def sample_ours(model: Any, prompts: torch.Tensor, reply: int) -> None:
    """Sample a reply of ``reply`` tokens to each prompt."""
    sampling = Sampling(eos_id=1, pad_id=0, max_new_tokens=reply, min_new_tokens=reply)
    batch = PromptBatch(prompts.tolist(), range(len(prompts)), 0)
    sample_replies(LocalSampler.of(model), 0, batch, sampling)


@torch.inference_mode()
def sample_theirs(model: Any, prompts: torch.Tensor, reply: int) -> None:
    """Do the same by transformers' ``generate``."""
    ids = prompts.to(model.device)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
        min_new_tokens=reply, max_new_tokens=reply, pad_token_id=0,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.vocabulary_memory``: peak memory at a large vocabulary, logits whole and in chunks.

Each pass runs in a process of its own, on a small body under a head of the given vocabulary, with replies of one
length. Printed are the process's peak resident memory (VmHWM) above what it held before the pass, and the processor
time of a pass. ``whole`` has the float32 logits of every position at once, ``chunks`` those of a chunk
(``compute.launch.STAGE.logits_mib``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.operations import DEFAULT_LOGITS_MIB, MIB
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import DistributionScorer, Tokens, response_logits
from rlhf_core.training.examples import Example
from rlhf_core.training.sft import example_batch, reply_loss

PASSES = ("scoring", "policy update", "policy update, exact KL", "SFT update")
WHOLE_MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """The model and the batch of one measurement."""

    vocabulary: int = 152_000
    hidden: int = 256
    dtype: str = "float32"
    rows: int = 8
    prompt: int = 64
    reply: int = 128
    repeats: int = 3


@dataclass(frozen=True)
class PassCost:
    """Peak memory of a pass above what was held before it, and its processor time (median)."""

    mib: float
    seconds: float


def main() -> int:
    """Measure every pass with logits whole and in chunks, print one table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vocabulary_memory", description=__doc__)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--mib", type=int, default=DEFAULT_LOGITS_MIB, help="float32 logits of one chunk")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    torch.set_num_threads(given["threads"])
    name, mib = given["child"], given["mib"]
    sizes = Sizes(**{field: given[field] for field in asdict(Sizes())})
    if name is not None:
        print(json.dumps(asdict(measure(name, sizes, mib * MIB))))
        return 0
    one = 4 * sizes.rows * (sizes.reply + 1) * sizes.vocabulary / MIB
    print(f"vocabulary {sizes.vocabulary}, hidden {sizes.hidden}, {sizes.dtype}, {sizes.rows} x {sizes.reply} tokens")
    print(f"float32 logits of all positions {one:.0f} MiB, of a chunk {mib} MiB; threads {given['threads']}")
    print(f"{'':<24} whole MiB  chunks MiB  memory    time")
    for name in PASSES:
        whole, chunks = (in_child(name, sizes, limit, given["threads"]) for limit in (WHOLE_MIB, mib))
        ratios = f"{chunks.mib / whole.mib:7.2f} {chunks.seconds / whole.seconds:7.2f}"
        print(f"{name:<24} {whole.mib:9.0f} {chunks.mib:11.0f} {ratios}", flush=True)
    return 0


def in_child(name: str, sizes: Sizes, mib: int, threads: int) -> PassCost:
    """Measure a pass in a new process, whose peak is its own."""
    fields = [part for field, value in asdict(sizes).items() for part in (f"--{field}", str(value))]
    command = [sys.executable, "-m", "benchmarks.vocabulary_memory", "--child", name, "--mib", str(mib)]
    done = subprocess.run([*command, "--threads", str(threads), *fields], stdout=subprocess.PIPE, text=True, check=True)
    return PassCost(**json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, sizes: Sizes, limit: int) -> PassCost:
    """Run a pass some times in this process."""
    model, reference = new_model(sizes, 0), new_model(sizes, 1)
    work = {
        "scoring": lambda: _score(model, reference, sizes, limit),
        "policy update": lambda: _update(model, None, sizes, limit),
        "policy update, exact KL": lambda: _update(model, reference, sizes, limit),
        "SFT update": lambda: _fine_tune(model, sizes, limit),
    }[name]
    before = memory("VmRSS")
    times = [_processor_seconds(work) for _ in range(sizes.repeats)]
    return PassCost((memory("VmHWM") - before) / MIB, sorted(times)[len(times) // 2])


def new_model(sizes: Sizes, seed: int) -> LlamaForCausalLM:
    """A body of two layers under a tied head; gradients exist before the pass, as they do from the second one on."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=4096, tie_word_embeddings=True,
        dtype=getattr(torch, sizes.dtype),
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config).to(getattr(torch, sizes.dtype)).eval()
    use_float32_unembedding(model)
    model.requires_grad_(seed == 0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def memory(field: str) -> int:
    """Bytes of a field of this process's status: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def _processor_seconds(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _tokens(sizes: Sizes) -> Tokens:
    ids = torch.randint(5, sizes.vocabulary, (sizes.rows, sizes.prompt + sizes.reply))
    return Tokens(ids, torch.ones_like(ids), torch.ones(sizes.rows, sizes.reply, dtype=torch.bool))


def _scorer(sizes: Sizes, limit: int) -> DistributionScorer:
    return DistributionScorer(Sampling(1, 0, sizes.reply, forbidden_ids=(0, 2)), limit)


@torch.inference_mode()
def _score(model: LlamaForCausalLM, reference: LlamaForCausalLM, sizes: Sizes, limit: int) -> None:
    tokens = _tokens(sizes)
    logits, other = response_logits(model, tokens), response_logits(reference, tokens)
    _scorer(sizes, limit).score(logits, tokens, entropies=True, reference=other)


def _update(model: LlamaForCausalLM, reference: LlamaForCausalLM | None, sizes: Sizes, limit: int) -> None:
    tokens, other = _tokens(sizes), None
    if reference is not None:
        with torch.no_grad():
            other = response_logits(reference, tokens)
    scored = _scorer(sizes, limit).score(response_logits(model, tokens), tokens, reference=other)
    loss = scored.logprobs.sum() if scored.full_kl is None else (scored.logprobs + scored.full_kl).sum()
    loss.backward()


def _fine_tune(model: LlamaForCausalLM, sizes: Sizes, limit: int) -> None:
    ids = _tokens(sizes).tokens.tolist()
    examples = [Example(row[: sizes.prompt], row[sizes.prompt :]) for row in ids]
    reply_loss(model, example_batch(examples, 0, torch.device("cpu")), 1, limit).backward()


if __name__ == "__main__":
    sys.exit(main())

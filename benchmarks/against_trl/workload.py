"""What both systems train on: random Llamas in a folder, prompts of equal length, and the sizes of
a run.

The standard library, torch and transformers are all that may be imported here: TRL runs in an
environment of its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

PAD, EOS = 0, 1
GROUP = 4  # replies to a prompt where a group is the baseline
LONGEST = 256  # tokens of a row of a training
ANSWER = "benchmark: "  # trainers print lines of their own
ENDLESS = 10_000  # iterations: more than are asked for
TRAININGS, ITERATIONS = ("sft", "reward", "dpo"), ("ppo", "grpo", "rloo")


@dataclass(frozen=True)
class Workload:
    """A training of ``steps`` with ``rows`` each, or one iteration.

    Every reply of an iteration has ``reply`` tokens, whatever is sampled. There are ``replies``, to
    as many prompts with a critic (``ppo``), to a :data:`GROUP`-th of them without. ``processes``
    divide them among themselves, and have ``threads`` each. With ``vllm`` TRL samples them by vLLM
    in its own process.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    reply: int
    processes: int
    threads: int
    method: str
    dtype: str
    steps: int = 12
    rows: int = 32
    replies: int = 64
    prompt: int = 20
    epochs: int = 1
    minibatches: int = 2
    vocabulary: int = 1024
    kv_heads: int | None = None
    vllm: bool = False

    @classmethod
    def read(cls, folder: Path) -> Workload:
        """The workload of a folder, with torch set to its number of threads."""
        workload = cls(**json.loads((folder / "workload.json").read_text()))
        torch.set_num_threads(workload.threads)
        return workload

    def write(self, folder: Path) -> None:
        """Save it to ``folder``, for iterations with their models (policy, value and reward)."""
        folder.mkdir(parents=True)
        (folder / "workload.json").write_text(json.dumps(asdict(self)))
        if self.method in TRAININGS:
            return
        # Imports bitsandbytes where it is installed, which warns.
        from transformers import (
            LlamaConfig,
            LlamaForCausalLM,
            LlamaForSequenceClassification,
            set_seed,
        )

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            max_position_embeddings=max(512, self.prompt + self.reply),
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
            tie_word_embeddings=True,
        )
        set_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / "policy")
        config.num_labels = 1
        for name in ("value", "reward"):
            LlamaForSequenceClassification(config).save_pretrained(folder / name)

    def prompt_ids(self) -> list[list[int]]:
        """Token ids of all prompts."""
        count = self.replies if self.method == "ppo" else self.replies // GROUP
        columns = range(self.prompt)
        return [
            [5 + (31 * row + column) % (self.vocabulary - 5) for column in columns]
            for row in range(count)
        ]


@contextmanager
def ranks(processes: int) -> Iterator[None]:
    """Make this process the first of ``processes`` ranks, which all run its own command, for the
    length of the block.

    The others end with it.
    """
    if processes == 1 or "RANK" in os.environ:
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ.update(
        size, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0"
    )
    others: list[subprocess.Popen[bytes]] = []
    try:
        for rank in map(str, range(1, processes)):
            environment = {**os.environ, "RANK": rank, "LOCAL_RANK": rank}
            others.append(subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment))
        yield
    finally:
        for other in others:
            try:
                other.wait(20)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()


class EndOfInput(BaseException):
    """No further iteration is asked for; not an ``Exception``, which a trainer might catch."""


class Stopwatch:
    """Answers each line of standard input with the seconds of one run, and ends with the input.

    An iteration is made between two calls of :meth:`lap`; the first lap only warms up. Of several
    ranks the first one answers, and the others keep step with it.
    """

    def __init__(self) -> None:
        self._started: float | None = None

    def lap(self) -> None:
        """End an iteration, print what it took, and wait until the next one is asked for.

        Raises:
            EndOfInput: None will be.
        """
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        if several:
            torch.distributed.barrier()
        now = time.perf_counter()
        more = torch.ones(1, device="cuda" if on_gpu else "cpu")
        if os.environ.get("RANK", "0") == "0":
            print(f"{ANSWER}{now - self._started if self._started else 'ready'}", flush=True)
            more.fill_(bool(sys.stdin.readline()))
        if several:
            # Nobody begins the next iteration while the first rank waits for its turn.
            torch.distributed.broadcast(more, 0)
        if not more:
            raise EndOfInput
        self._started = time.perf_counter()

    def repeat(self, iteration: Callable[[], object]) -> None:
        """Make iterations until the input ends."""
        while True:
            iteration()
            self.lap()

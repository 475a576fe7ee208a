"""``python -m benchmarks.against_trl``: seconds of trainings and of iterations, this project's and
TRL's in turn.

SFT, a reward model and DPO are trained from the same random model, tokenizer, rows, steps and rows
per step: from texts in memory to trained weights, so that tokenizing and
collating count, and loading does not. Each system keeps its own order of rows, and with it its
padding.

Of PPO, GRPO and RLOO iterations are made: as many replies, forced replies of one length, epochs and
minibatches of the same random models, with value and reward model of the policy's size, without
texts of pretraining and referee. Ours takes the ratio to the sampler, as TRL's PPO does; TRL's
RLOO, and its GRPO with several minibatches, score replies once more. Each system divides the cores
as it is told to: as threads of one process, or as data-parallel processes.

Where there is a GPU both compute on it, by default iterations of PPO and GRPO of a model of
Qwen2.5-0.5B's shape in bfloat16, which takes about ten minutes and 60 GB of its memory.

All make their runs in turn, so that other work on the machine meets all of them. Printed are
medians, as soon as they are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.against_trl.workload import ANSWER, ITERATIONS, TRAININGS, Workload
from benchmarks.harness import announce, in_turn, worker
from rlhf_core.config.base import BaseConfig
from rlhf_core.models.causal_lm import new_model, train_tokenizer
from rlhf_core.models.io import quiet
from rlhf_core.world.corpus import demonstrations, preferences

SIZES: dict[str, dict[str, Any]] = {
    "0.43 M": {"hidden": 96, "intermediate": 256, "layers": 3, "heads": 4},
    "4.3 M": {"hidden": 256, "intermediate": 688, "layers": 5, "heads": 8},
    "0.5 B": {
        "hidden": 896,
        "intermediate": 4864,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "vocabulary": 151_936,
        "prompt": 256,
        "minibatches": 8,
    },
}
ON_CPU, ON_GPU = ("0.43 M", "4.3 M"), ("0.5 B",)
ROW = "{:<8}{:<12}{:>5}{:>21}{:>9}{:>9}{:>12}"


def _arguments(arguments: Sequence[str] | None, on_gpu: bool) -> argparse.Namespace:
    """What is measured: by default what suits the machine. Sizes and cores fit each other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_trl", description=__doc__)
    parser.add_argument(
        "--trl-python", type=Path, required=True, help="the Python of an environment with TRL"
    )
    methods = (*TRAININGS, *ITERATIONS)
    usual = ("ppo", "grpo") if on_gpu else methods
    parser.add_argument("--method", choices=methods, nargs="+", default=list(usual))
    parser.add_argument("--size", choices=SIZES, nargs="+",
                        help="parameters of each model; by default 0.5 B on a GPU; on a CPU PPO has the others, the "
                        "other methods the first")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=Workload.steps, help="optimiser steps of a training"
    )
    parser.add_argument(
        "--rows", type=int, default=Workload.rows, help="rows, or pairs, of a training's step"
    )
    parser.add_argument(
        "--reply",
        type=int,
        nargs="+",
        default=[256 if on_gpu else 64],
        help="tokens of each reply of an iteration",
    )
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="TRL's GRPO and RLOO sample by vLLM, which its environment has",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32",
                        help="of iterations; bfloat16: ours has float32 masters, TRL float32 weights under "
                        "autocast")  # fmt: skip
    cores = torch.get_num_threads()
    replies = _replies_of_minibatch(ON_CPU[0])
    most = max(count for count in range(1, cores + 1) if replies % count == 0)
    divisions_of_cores = {(1, cores)} if on_gpu else {(1, cores), (most, 1)}
    parser.add_argument("--cores", type=_division, nargs="+", default=sorted(divisions_of_cores),
                        help="processes x threads of each, such as 1x2 2x1; by default all cores as threads, and "
                        "without a GPU as processes, too; a process has a GPU of its own; a training has one "
                        "process, with the threads of the first",
                        metavar="PxT")  # fmt: skip
    given = parser.parse_args(arguments)
    usual_sizes = ON_GPU if on_gpu else ON_CPU
    for size, (processes, _) in itertools.product(given.size or usual_sizes, given.cores):
        replies = _replies_of_minibatch(size)
        if replies % processes:
            parser.error(f"--cores: give a number of processes that divides {replies} with {size}")
    return given


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Print a table of each method, size and length; return TRL's time over ours by name.

    The best division of the cores counts for each.
    """
    on_gpu = torch.cuda.is_available()
    given = _arguments(arguments, on_gpu)
    usual_sizes = ON_GPU if on_gpu else ON_CPU
    shared = {"steps": given.steps, "rows": given.rows, "vllm": given.vllm}
    ratios = {}
    print(f"trainings in float32, and one iteration in {given.dtype}")
    print(
        ROW.format(
            "", "parameters", "reply", "processes x threads", "ours, s", "TRL, s", "TRL / ours"
        ),
        flush=True,
    )
    for method in given.method:
        training = method in TRAININGS
        divisions = [(1, given.cores[0][1])] if training else given.cores
        sizes = given.size or (usual_sizes if method == "ppo" else usual_sizes[:1])
        for size, reply in itertools.product(sizes, [0] if training else given.reply):
            what = f"{method}, {size}" + ("" if training else f", replies of {reply}")
            announce(what)
            workloads = [
                Workload(**SIZES[size], **shared, reply=reply, processes=processes, threads=threads, method=method,
                         dtype="float32" if training else given.dtype)
                for processes, threads in divisions
            ]  # fmt: skip
            ours, theirs = _measure(workloads, given.trl_python, given.repeats)
            names = [f"{processes} x {threads}" for processes, threads in divisions]
            if len(divisions) > 1:
                names, ours, theirs = (
                    [*names, "each's best"],
                    [*ours, min(ours)],
                    [*theirs, min(theirs)],
                )
            for division, mine, other in zip(names, ours, theirs, strict=True):
                times = (f"{mine:.2f}", f"{other:.2f}", f"{other / mine:.2f} times")
                print(ROW.format(method, size, reply or "", division, *times), flush=True)
            ratios[what] = min(theirs) / min(ours)
    return ratios


def _division(text: str) -> tuple[int, int]:
    """Processes and threads of ``PxT``."""
    processes, threads = map(int, text.split("x"))
    if processes < 1 or threads < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least one process and one thread")
    return processes, threads


def _replies_of_minibatch(size: str) -> int:
    """Replies of a minibatch, of which each process has an equal share."""
    minibatches: int = SIZES[size].get("minibatches", Workload.minibatches)
    return Workload.replies // minibatches


def _measure(
    workloads: Sequence[Workload], trl_python: Path, repeats: int
) -> tuple[list[float], list[float]]:
    """The median seconds of both systems with each workload, all in turn."""
    script = str(Path(__file__).with_name("trl_trainers.py"))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folders = [
            str(Path(temporary) / f"{workload.processes}x{workload.threads}")
            for workload in workloads
        ]
        with quiet():
            for workload, folder in zip(workloads, folders, strict=True):
                workload.write(Path(folder))
                if workload.method in TRAININGS:
                    _write_training(workload, Path(folder))
        ours = [[sys.executable, "-m", "benchmarks.against_trl.ours", folder] for folder in folders]
        theirs = [[str(trl_python), script, folder] for folder in folders]
        log = stack.enter_context((Path(temporary) / "log").open("w+"))
        runs = [
            stack.enter_context(worker(command, ANSWER, log=log)) for command in (*ours, *theirs)
        ]
        medians = [seconds for (seconds,) in in_turn(runs, repeats)]
    return medians[: len(ours)], medians[len(ours) :]


def _write_training(workload: Workload, folder: Path) -> None:
    """Save model, tokenizer and rows; rows are conversations, which both systems read as they
    are.
    """
    tokenizer = train_tokenizer([str(row["reply"]) for row in demonstrations(0, 2000)], 1024)
    shape = BaseConfig(
        hidden_size=workload.hidden,
        intermediate_size=workload.intermediate,
        layers=workload.layers,
        heads=workload.heads,
    )
    new_model(shape, tokenizer, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    count = workload.steps * workload.rows
    if workload.method == "sft":
        rows = [
            {"prompt": row["prompt"], "completion": _turn(row["reply"])}
            for row in demonstrations(1, count)
        ]
    else:
        rows = [
            {
                "prompt": row["prompt"],
                "chosen": _turn(row["chosen"]),
                "rejected": _turn(row["rejected"]),
            }
            for row in preferences(1, count)
        ]
    (folder / "rows.json").write_text(json.dumps(rows))


def _turn(reply: object) -> list[dict[str, object]]:
    return [{"role": "assistant", "content": reply}]


if __name__ == "__main__":
    main()

"""``python -m benchmarks.ppo_iteration``: seconds per iteration of PPO, GRPO and RLOO, ours and TRL's in turn.

Both make the same work: as many replies, forced replies of one length, epochs and minibatches of the same random
models, with value and reward model of the policy's size, without texts of pretraining and referee. Each
divides the cores as it is told to: as threads of one process, or as data-parallel processes. All make iterations in
turn, so that other work on the machine meets all of them. Printed are medians, as soon as they are measured.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import announce, in_turn, worker
from benchmarks.ppo_iteration.workload import ANSWER, Workload
from rlhf_core.models.io import quiet

SIZES: dict[str, dict[str, Any]] = {
    "0.43 M": {"hidden": 96, "intermediate": 256, "layers": 3, "heads": 4},
    "4.3 M": {"hidden": 256, "intermediate": 688, "layers": 5, "heads": 8},
}

ROW = "{:<6}{:<12}{:>7}{:>21}{:>9}{:>12}"
MINIBATCH = Workload.replies // Workload.minibatches  # replies, of which each process has a share
METHODS = ("ppo", "grpo", "rloo")


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Measure each size and length and print a table; returns TRL's time over ours by size, best division of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ppo_iteration", description=__doc__)
    parser.add_argument("--trl-python", type=Path, required=True, help="the Python of an environment with TRL")
    parser.add_argument("--method", choices=METHODS, nargs="+", default=list(METHODS),
                        help="grpo and rloo at the first size alone")  # fmt: skip
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES), help="parameters of each model")
    parser.add_argument("--reply", type=int, nargs="+", default=[64], help="tokens of each reply")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="bfloat16: ours has float32 masters, TRL float32 weights under autocast")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    cores = torch.get_num_threads()
    most = max(filter(_shares_evenly, range(1, cores + 1)))
    parser.add_argument("--cores", type=_division, nargs="+", default=sorted({(1, cores), (most, 1)}),
                        help="processes x threads of each, such as 1x2 2x1; by default all cores as threads, and as "
                        "processes", metavar="PxT")  # fmt: skip
    given = parser.parse_args(arguments)
    ratios = {}
    print(f"one iteration, {given.dtype}")
    print(ROW.format("", "parameters", "reply", "processes x threads", "ours, s", "TRL, s"), flush=True)
    sizes = [(method, size) for method in given.method for size in given.size[: None if method == "ppo" else 1]]
    for (method, size), reply in itertools.product(sizes, given.reply):
        workloads = [
            Workload(**SIZES[size], reply=reply, processes=processes, threads=threads, method=method, dtype=given.dtype)
            for processes, threads in given.cores
        ]
        announce(f"{method} with {size} parameters and replies of {reply}")
        ours, theirs = _measure(workloads, given.trl_python, given.repeats)
        for (processes, threads), mine, other in zip(given.cores, ours, theirs, strict=True):
            print(ROW.format(method, size, reply, f"{processes} x {threads}", f"{mine:.2f}", f"{other:.2f}"))
        ratios[f"{method}, {size}, replies of {reply}"] = ratio = min(theirs) / min(ours)
        print(ROW.format(method, size, reply, "each's best", "", f"{ratio:.2f} times"), flush=True)
    return ratios


def _division(text: str) -> tuple[int, int]:
    """Processes and threads of ``PxT``.

    Raises:
        ArgumentTypeError: The processes cannot have equal shares of a minibatch.
    """
    processes, threads = map(int, text.split("x"))
    if threads < 1 or not _shares_evenly(processes):
        raise argparse.ArgumentTypeError(f"{text}: give a number of processes that divides {MINIBATCH}, and threads")
    return processes, threads


def _shares_evenly(processes: int) -> bool:
    return processes > 0 and MINIBATCH % processes == 0


def _measure(workloads: Sequence[Workload], trl_python: Path, repeats: int) -> tuple[list[float], list[float]]:
    """The median seconds of both systems with each workload, all in turn."""
    script = str(Path(__file__).with_name("trl_trainer.py"))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folders = [str(Path(temporary) / f"{workload.processes}x{workload.threads}") for workload in workloads]
        with quiet():
            for workload, folder in zip(workloads, folders, strict=True):
                workload.write(Path(folder))
        ours = [[sys.executable, "-m", "benchmarks.ppo_iteration.ours", folder] for folder in folders]
        theirs = [[str(trl_python), script, folder] for folder in folders]
        log = stack.enter_context((Path(temporary) / "log").open("w+"))
        runs = [stack.enter_context(worker(command, ANSWER, log=log)) for command in (*ours, *theirs)]
        medians = [seconds for (seconds,) in in_turn(runs, repeats)]
    return medians[: len(ours)], medians[len(ours) :]


if __name__ == "__main__":
    main()

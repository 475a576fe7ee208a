"""``python -m benchmarks.training_runs``: seconds of whole training runs, this project's and TRL's, in turn.

SFT, a reward model and DPO are trained from the same random model, tokenizer, rows, steps and rows per step, without
accelerators: from texts in memory to trained weights, so that tokenizing and collating count, and loading does not.
Each system keeps its own order of rows, and with it its padding. Printed are medians, a row as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.harness import announce, in_turn, worker
from benchmarks.ppo_iteration.__main__ import SIZES
from benchmarks.ppo_iteration.workload import ANSWER
from rlhf_core.config.base import BaseConfig
from rlhf_core.models.causal_lm import new_model, train_tokenizer
from rlhf_core.models.io import quiet
from rlhf_core.world.corpus import demonstrations, preferences

METHODS = ("sft", "reward", "dpo")
ROW = "{:<12}{:<9}{:>9}{:>9}   {}"


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Measure each method and size and print a row of each; returns TRL's time over ours by what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_runs", description=__doc__)
    parser.add_argument("--trl-python", type=Path, required=True, help="the Python of an environment with TRL")
    parser.add_argument("--method", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["0.43 M"], help="parameters of the model")
    parser.add_argument("--steps", type=int, default=12, help="optimiser steps of a run")
    parser.add_argument("--rows", type=int, default=32, help="rows, or pairs, of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args(arguments)
    ratios = {}
    print(ROW.format("parameters", "training", "ours, s", "TRL, s", "TRL's time over ours"), flush=True)
    for size in given.size:
        for method in given.method:
            announce(f"{method} with {size} parameters")
            ours, theirs = _measure(given, size, method)
            print(ROW.format(size, method, f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f} times"), flush=True)
            ratios[f"{method}, {size}"] = theirs / ours
    return ratios


def _measure(given: argparse.Namespace, size: str, method: str) -> tuple[float, float]:
    """The median seconds of a run of either system."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary) / "workload"
        with quiet():
            _write(folder, given, size, method)
        commands = (
            [sys.executable, "-m", "benchmarks.training_runs.ours", str(folder)],
            [str(given.trl_python), str(Path(__file__).with_name("trl_trainers.py")), str(folder)],
        )
        log = stack.enter_context((Path(temporary) / "log").open("w+"))
        runs = [stack.enter_context(worker(command, ANSWER, log=log)) for command in commands]
        (ours,), (theirs,) = in_turn(runs, given.repeats)
    return ours, theirs


def _write(folder: Path, given: argparse.Namespace, size: str, method: str) -> None:
    """Save model, tokenizer, rows and settings; rows are conversations, which both systems read as they are."""
    folder.mkdir()
    widths = SIZES[size]
    tokenizer = train_tokenizer([str(row["reply"]) for row in demonstrations(0, 2000)], 1024)
    shape = BaseConfig(
        hidden_size=widths["hidden"],
        intermediate_size=widths["intermediate"],
        layers=widths["layers"],
        heads=widths["heads"],
    )
    new_model(shape, tokenizer, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    count = given.steps * given.rows
    if method == "sft":
        rows = [{"prompt": row["prompt"], "completion": _turn(row["reply"])} for row in demonstrations(1, count)]
    else:
        rows = [
            {"prompt": row["prompt"], "chosen": _turn(row["chosen"]), "rejected": _turn(row["rejected"])}
            for row in preferences(1, count)
        ]
    settings = {"method": method, "steps": given.steps, "rows": given.rows, "threads": given.threads}
    (folder / "workload.json").write_text(json.dumps({**settings, "data": rows}))


def _turn(reply: object) -> list[dict[str, object]]:
    return [{"role": "assistant", "content": reply}]


if __name__ == "__main__":
    main()

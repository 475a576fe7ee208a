"""``python -m benchmarks.ppo_iteration``: seconds per PPO iteration, this project's trainer and TRL's in turn.

Both make the same work: as many prompts, forced replies of one length, epochs and minibatches of the same random
models in float32, with value and reward model of the policy's size, without texts of pretraining and referee. Each is
a process of its own, and they make iterations in turn, so that other work on the machine meets both. ``make bench``
makes TRL's environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.ppo_iteration.workload import ANSWER, Workload

SIZES = {
    "0.43 M": {"hidden": 96, "intermediate": 256, "layers": 3, "heads": 4},
    "4.3 M": {"hidden": 256, "intermediate": 688, "layers": 5, "heads": 8},
}


class Worker:
    """A process that makes one iteration each time it is asked to."""

    def __init__(self, command: Sequence[str], stack: ExitStack) -> None:
        self._program = command[0]
        pipe = subprocess.PIPE
        self._process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        stack.callback(self._process.stdin.close)  # type: ignore[union-attr]
        self.answer()

    def iterate(self) -> dict[str, float]:
        """Seconds of wall and processor time of one iteration."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        times: dict[str, float] = json.loads(self.answer())
        return times

    def answer(self) -> str:
        """Its next answer."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER)
        raise SystemExit(f"a trainer of {self._program} ended with status {self._process.wait()}")


def main() -> int:
    """Measure each size and length, print a table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ppo_iteration", description=__doc__)
    parser.add_argument("--trl-python", type=Path, required=True, help="the Python of an environment with TRL")
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES), help="parameters of each model")
    parser.add_argument("--reply", type=int, nargs="+", default=[64, 128], help="tokens of each reply")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    columns = ("parameters", "reply", "ours, s", "TRL, s", "ratio", "ours, CPU s", "TRL, CPU s", "ratio, CPU")
    table = Table(*columns, title=f"one PPO iteration, medians of {given.repeats}, {given.threads} threads")
    for size in given.size:
        for reply in given.reply:
            workload = Workload(**SIZES[size], reply=reply, threads=given.threads)
            table.add_row(size, str(reply), *_measure(workload, given.trl_python, given.repeats))
    Console().print(table)
    return 0


def _measure(workload: Workload, trl_python: Path, repeats: int) -> list[str]:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary) / "workload"
        workload.write(folder)
        script = Path(__file__).with_name("trl_trainer.py")
        workers = [
            Worker([sys.executable, "-m", "benchmarks.ppo_iteration.ours", str(folder)], stack),
            Worker([str(trl_python), str(script), str(folder)], stack),
        ]
        laps = [[worker.iterate() for worker in workers] for _ in range(repeats)]
    cells = []
    for name in ("seconds", "processor_seconds"):
        ours, theirs = (statistics.median(lap[index][name] for lap in laps) for index in range(2))
        cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}"]
    return cells


if __name__ == "__main__":
    sys.exit(main())

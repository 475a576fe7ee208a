"""``python -m benchmarks.data_scale``: rows per second and memory of the stages collect and validate.

Synthetic pairs of 1.2 kB are written as JSON lines to a temporary folder. Each stage runs as a process of its own, and
its peak of resident memory is read when it has ended. The last column is the processor time per pair beside that of the
smallest size: 1.0 is linear.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SIZES = (50_000, 200_000, 1_000_000)
STAGES = ("collect", "validate")
PAIR_BYTES = 1200
VOCABULARY = 4000
REPEATED_PROMPTS = 0.2  # share of pairs that are about the prompt of an earlier one
PARAMS = """\
collect:
  source: files
  files:
    preferences: [pairs.jsonl]
"""


@dataclass(frozen=True)
class StageCost:
    """What a stage took: wall seconds, processor seconds, and the peak of resident memory in bytes."""

    wall: float
    processor: float
    peak: int


def main() -> int:
    """Measure the sizes that were asked for, print a table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_scale", description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=SIZES, help="numbers of pairs")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    given = parser.parse_args()
    costs: dict[int, dict[str, StageCost]] = {}
    for count in given.pairs:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            write_pairs(Path(folder), count)
            costs[count] = {}
            for stage in STAGES:
                costs[count][stage] = run(stage, Path(folder))
                _print(costs)
    return 0


def write_pairs(workspace: Path, count: int) -> None:
    """Write ``count`` pairs to an empty folder, and the parameters that name them."""
    with open(workspace / "pairs.jsonl", "w", encoding="utf-8") as stream:
        stream.writelines(lines(count))
    (workspace / "params.yaml").write_text(PARAMS)


def lines(count: int) -> Iterator[str]:
    """Yield ``count`` pairs as JSON; no two are the same."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(VOCABULARY)]

    def text(size: int) -> str:
        return " ".join(draw.choices(words, k=max(size // 6, 1)))

    prompts: list[str] = []
    for number in range(count):
        repeated = bool(prompts) and draw.random() < REPEATED_PROMPTS
        prompt = prompts[draw.randrange(len(prompts))] if repeated else f"{number} {text(250)}"
        prompts = [*prompts[-999:], prompt]
        lengths = draw.randint(250, 600)
        chosen, rejected = text(lengths), text(PAIR_BYTES - 300 - lengths)
        yield f'{{"prompt": "{prompt}?", "chosen": "{chosen}.", "rejected": "{rejected}, {number}."}}\n'


def run(stage: str, workspace: Path) -> StageCost:
    """Run a stage in ``workspace`` as a child process."""
    started = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1"}
    child = subprocess.Popen([sys.executable, "-m", "rlhf_core", "stage", stage], cwd=workspace, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"stage {stage} ended with exit code {child.returncode}")
    kilobyte = 1 if sys.platform == "darwin" else 1024
    wall = time.perf_counter() - started
    return StageCost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * kilobyte)


def _print(costs: dict[int, dict[str, StageCost]]) -> None:
    table = Table("pairs", "stage", "seconds", "pairs/s", "processor s", "peak GiB", "time per pair")
    smallest = min(costs)
    for count, stages in costs.items():
        for stage, cost in stages.items():
            ratio = (cost.processor / count) / (costs[smallest][stage].processor / smallest)
            rate, peak = f"{count / cost.wall:,.0f}", f"{cost.peak / 2**30:.2f}"
            table.add_row(f"{count:,}", stage, f"{cost.wall:.0f}", rate, f"{cost.processor:.0f}", peak, f"{ratio:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())

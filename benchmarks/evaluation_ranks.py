"""The evaluate stage on one process and on several: its time over the number of prompts and of ranks.

Makes a workspace with random models of the demo's shape and random prompts, and runs `rlhf stage evaluate` there with
each number of processes, one thread each. Random models hardly ever end a reply, so that all replies have the same
length. The last column is the largest difference of any metric to those of the first run, relative to its size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.data_scale import ROOT

TOKENS = 64
PARAMS = """\
evaluate:
  prompts: {prompts}
  sampling: {{max_new_tokens: {tokens}}}
  safety: {{prompts: 0}}
compute:
  launch:
    evaluate: {{processes: {processes}}}
"""


def main() -> int:
    """Measure the numbers that were asked for, print a table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation_ranks", description=__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=(1000, 10_000))
    parser.add_argument("--processes", type=int, nargs="+", default=(1, 2))
    given = parser.parse_args()
    table = Table("prompts", "processes", "seconds", "processor s", "judged replies/s", "largest difference")
    for prompts in given.prompts:
        first: dict[str, float] = {}
        for processes in given.processes:
            with tempfile.TemporaryDirectory() as name:
                make_workspace(Path(name), prompts, processes)
                wall, processor = evaluated(Path(name))
                metrics = dict(numbers(json.loads((Path(name) / "metrics/evaluation.json").read_text())))
            first = first or metrics
            difference = max(abs(value - first[key]) / max(abs(first[key]), 1.0) for key, value in metrics.items())
            rate = f"{2 * prompts / wall:,.1f}"
            table.add_row(f"{prompts:,}", str(processes), f"{wall:.0f}", f"{processor:.0f}", rate, f"{difference:.1e}")
            Console(width=110).print(table)
    return 0


def make_workspace(folder: Path, prompts: int, processes: int) -> None:
    """Write random models, ``prompts`` different questions, and the stage's parameters."""
    from rlhf_core.config.base import BaseConfig
    from rlhf_core.data.schema import Message, Preference, PretrainText, Prompt, write_rows
    from rlhf_core.models.heads import ScalarModel
    from rlhf_core.models.starting.base import new_model, save_policy, train_tokenizer

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(500)]
    texts = [" ".join([str(number), *draw.choices(words, k=draw.randint(2, 24))]) for number in range(prompts)]
    rows = [Prompt(f"{i:016x}", [Message("user", text)], "", "file", text) for i, text in enumerate(texts)]
    pair = Preference("0", rows[0].prompt, texts[1], texts[2], None, "", "file", "g")
    write_rows(folder / "data/clean/prompts/test.parquet", rows)
    write_rows(folder / "data/clean/preferences/test.parquet", [pair])
    write_rows(folder / "data/clean/pretrain/validation.parquet", [PretrainText("0", texts[3], "", "file", "g")])
    shape = BaseConfig()
    tokenizer = train_tokenizer(texts[:2000], shape.vocab_size)
    for seed, name in enumerate(("sft", "policy"), start=1):
        save_policy(folder / "models" / name, new_model(shape, tokenizer, seed), tokenizer)
    for seed, name in enumerate(("reward", "referee", "judge"), start=1):
        ScalarModel.from_causal_lm(folder / "models/sft", seed).save(folder / "models" / name, tokenizer)
    (folder / "params.yaml").write_text(PARAMS.format(prompts=prompts, tokens=TOKENS, processes=processes))


def evaluated(workspace: Path) -> tuple[float, float]:
    """Run the stage; wall and processor seconds, those of its ranks included."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "DO_NOT_TRACK": "1",
        "RLHF_TRACKING": "off",
        "OMP_NUM_THREADS": "1",
    }
    started = time.perf_counter()
    command = [sys.executable, "-m", "rlhf_core", "stage", "evaluate"]
    child = subprocess.Popen(command, cwd=workspace, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"the stage ended with exit code {child.returncode}")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def numbers(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested metrics by their paths."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{name}.")
        elif isinstance(value, int | float):
            yield f"{path}{name}", value


if __name__ == "__main__":
    sys.exit(main())

"""Tokenised pairs: how long they take the first and every later time, and how much memory they hold.

Writes synthetic pairs to a parquet file of clean data and reads them as the stage of the reward model does, each time
in a process of its own: without a cache, with an empty one, and with the entry that this made. Memory is what the
process itself holds (anonymous pages); pages of the mapped file are listed apart: the system has them once for all
processes and takes them back when it needs room.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.data_scale import ROOT, lines

MAX_TOKENS = 1024
VOCABULARY = 4000
PAIRS_FILE, TOKENIZER, CACHE = "pairs.parquet", "tokenizer", "tokens"


@dataclass(frozen=True)
class ReadingCost:
    """What reading all pairs took: seconds, and bytes of memory by kind.

    Attributes:
        seconds: Until all pairs were ready to train on.
        processor: The same in processor time, which other work on the machine disturbs less.
        texts: Bytes of the rows with their texts, as Arrow holds them.
        held: Anonymous memory that the process has beyond what it had before, without ``texts``.
        mapped: Pages of files that the process has in memory beyond what it had before.
        peak: The most resident memory at any time.
        token_bytes: Bytes of all token ids.
        tokens: Token ids of all pairs.
    """

    seconds: float
    processor: float
    texts: int
    held: int
    mapped: int
    peak: int
    token_bytes: int
    tokens: int


def main() -> int:
    """Measure, print a table, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_cache", description=__doc__)
    parser.add_argument("--pairs", type=int, default=200_000, help="number of pairs")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "CACHE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(asdict(read_pairs(Path(given.measure[0]), given.measure[1]))))
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        write_pairs(folder, given.pairs)
        costs = {
            "without a cache": measured(folder, ""),
            "with a cache, first time": measured(folder, CACHE),
            "with a cache, second time": measured(folder, CACHE),
        }
    _print(costs, given.pairs)
    return 0


def write_pairs(folder: Path, count: int) -> None:
    """Write ``count`` pairs and a tokenizer made of the first of them."""
    from rlhf_core.data.schema import Preference, arrow_schema, tables_of
    from rlhf_core.data.tables import TableWriter
    from rlhf_core.models.starting.base import train_tokenizer

    def rows() -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines(count)):
            pair = json.loads(line)
            prompt = [{"role": "user", "content": pair["prompt"]}]
            texts = {"prompt": prompt, "chosen": pair["chosen"], "rejected": pair["rejected"]}
            yield {"id": str(number), **texts, "margin": None, "category": "", "source": "files", "group": str(number)}

    part: list[dict[str, Any]] = []
    with TableWriter(folder / PAIRS_FILE, arrow_schema(Preference.KIND)) as writer:
        for number, row in enumerate(rows(), start=1):
            part.append(row)
            if len(part) == 20_000 or number == count:
                if number <= 20_000:
                    texts = (row["chosen"] for row in part[:2000])
                    train_tokenizer(texts, VOCABULARY).save_pretrained(folder / TOKENIZER)
                for table in tables_of(Preference.KIND, part):
                    writer.write(table)
                part = []


def measured(folder: Path, cache: str) -> ReadingCost:
    """Read the pairs in a process of its own, by way of the cache of that name."""
    command = [sys.executable, "-m", "benchmarks.token_cache", "--measure", str(folder), cache]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": os.environ.get("RAYON_NUM_THREADS", "1")}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return ReadingCost(**json.loads(done.stdout))


def read_pairs(folder: Path, cache: str) -> ReadingCost:
    """Read the pairs as the stage does, and look at every pair's length as its planner does."""
    import pyarrow as pa
    from transformers import AutoTokenizer

    from rlhf_core.config.reward import RewardConfig
    from rlhf_core.data.schema import Preference, read_kind
    from rlhf_core.training.reward.run import read_split
    from rlhf_core.training.reward.trainer import pair_batches

    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
    tokenizer("warm up")
    before, started, processor = _memory(), time.perf_counter(), time.process_time()
    split = read_split(folder / PAIRS_FILE, tokenizer, MAX_TOKENS, folder / cache if cache else None)
    batches = pair_batches(split.pairs, RewardConfig(), "reward")
    batches.at(0)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    pa.default_memory_pool().release_unused()
    after, texts = _memory(), read_kind(folder / PAIRS_FILE, Preference).nbytes
    tokens = split.tokens
    return ReadingCost(
        seconds,
        processor,
        texts,
        after["RssAnon"] - before["RssAnon"] - texts,
        after["RssFile"] - before["RssFile"],
        after["VmHWM"],
        tokens.table.nbytes,
        sum(int(tokens.column(name).lengths.sum()) for name in tokens.id_columns),
    )


def _memory() -> dict[str, int]:
    """Bytes by the names of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, flags=re.MULTILINE)}


def _print(costs: dict[str, ReadingCost], pairs: int) -> None:
    table = Table("", "seconds", "processor s", "held beside texts", "mapped", "texts", "peak")
    for name, cost in costs.items():
        sizes = (cost.held, cost.mapped, cost.texts)
        table.add_row(
            name,
            f"{cost.seconds:.1f}",
            f"{cost.processor:.1f}",
            *(f"{size / pairs:,.0f} B/pair" for size in sizes),
            f"{cost.peak / 2**30:.2f} GiB",
        )
    Console(width=110).print(table)
    cost = next(iter(costs.values()))
    print(f"{pairs:,} pairs of {cost.tokens / pairs:.0f} tokens, {cost.token_bytes / pairs:,.0f} B/pair of token ids")


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.ppo_throughput``: the times of a PPO iteration, and how near each phase is to the limits.

The trainer of the PPO stage runs on random models of a recipe's sizes. Its times are compared with the limits of the
device, which are measured first: matrix products in the precision of the weights, and memory. Under torchrun all ranks
make iterations together, with the engine that the recipe names.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ppo_throughput.roofline import PHASES, Device, Iteration
from benchmarks.ppo_throughput.trainer import Times, measure, subject_of
from rlhf_core.errors import RlhfError
from rlhf_core.memory.architecture import starting_architecture
from rlhf_core.memory.command import PlanRequest
from rlhf_core.models.precision import allow_tf32, weights_precision
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import atomic_write_json

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Measure, print a table, and exit 0; 1 for settings that cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ppo_throughput", description=__doc__)
    parser.add_argument("--profile", help="the recipe; the demo's if not given")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="may be repeated")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json in place of the recipe's model")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--reply", type=int, default=256, help="tokens of each reply")
    parser.add_argument("--iterations", type=int, default=3, help="after one to warm up")
    parser.add_argument("--threads", type=int, help="of each process on a CPU; all cores if not given")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the measured shares as JSON")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        with distributed.process_group(), tempfile.TemporaryDirectory() as work:
            found = _measured(given, Path(work))
            if distributed.is_rank_zero():
                Console().print(_table(found))
                if given.output is not None:
                    atomic_write_json(given.output, found)
    except RlhfError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _measured(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Times, limits and shares, as they are written."""
    processes = distributed.world_size()
    params = PlanRequest(ROOT, given.profile, given.set, ("ppo",), given.config, gpus=processes).params
    allow_tf32(params.compute.tf32)
    subject = subject_of(params, starting_architecture(params.base, ROOT, given.config), given.prompt, given.reply)
    precision = weights_precision(params.base.dtype)
    device = Device.measured(getattr(torch, precision))
    times = measure(subject, given.iterations, work)
    iteration = Iteration.of(subject.params, subject.architecture, given.prompt, given.reply, processes)
    return {
        "model": str(given.config or params.base.source),
        "precision": precision,
        "processes": processes,
        "rows": iteration.rows,
        "prompt": given.prompt,
        "reply": given.reply,
        "device": asdict(device),
        "seconds": {"iteration": times.iteration, **times.phases},
        "tokens_per_second": iteration.tokens / times.iteration,
        "peak_bytes": times.peak_bytes,
        "sampler_against_trainer": times.agreement,
        "matmul_shares": _matmul_shares(iteration, device, times),
        "roofline_shares": {name: least / times.phases[name] for name, least in iteration.roofline(device).items()},
    }


def _matmul_shares(iteration: Iteration, device: Device, times: Times) -> dict[str, float]:
    """FLOP of the model on its tokens, what is computed twice counted once, as shares of the device's limit."""
    flops = {
        "generation": iteration.policy.forward(iteration.rows, iteration.length, iteration.reply),
        "forward": iteration.scoring_flops(),
        "rewards": iteration.reward_flops(),
        "update": replace(iteration, recomputed=False).update_flops(),
    }
    return {name: flops[name] / times.phases[name] / device.flops for name in PHASES}


def _table(found: Mapping[str, Any]) -> Table:
    device, rows = found["device"], found["rows"]
    title = (
        f"{found['model']} in {found['precision']}, {found['processes']} x {rows} replies of {found['reply']} tokens "
        f"to prompts of {found['prompt']}\n{device['name']}: {device['flops'] / 1e12:.3g} TFLOP/s, "
        f"{device['bandwidth'] / 1e9:.0f} GB/s"
    )
    table = Table("phase", "seconds", "tokens/s per process", "of the matmul limit", "of the roofline", title=title)
    tokens = rows * (found["prompt"] + found["reply"])
    for name in PHASES:
        seconds = found["seconds"][name]
        made = rows * found["reply"] if name == "generation" else tokens
        table.add_row(
            name, f"{seconds:.3f}", f"{made / seconds:.0f}", f"{found['matmul_shares'][name]:.1%}",
            f"{found['roofline_shares'][name]:.1%}",
        )  # fmt: skip
    table.add_row("iteration", f"{found['seconds']['iteration']:.3f}", f"{found['tokens_per_second']:.0f}", "", "")
    if found["peak_bytes"] is not None:
        table.caption = f"peak {found['peak_bytes'] / (1 << 30):.1f} GiB"
    return table


if __name__ == "__main__":
    sys.exit(main())

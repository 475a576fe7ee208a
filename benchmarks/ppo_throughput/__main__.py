"""``python -m benchmarks.ppo_throughput``: the times of a PPO iteration, and how near each phase is
to the limits.

The trainer of the PPO stage runs on random models of a recipe's sizes. Its times are compared with
the limits of the device, which are measured first: matrix products in the precision of the weights,
and memory. Under torchrun all ranks make iterations together, with the engine that the recipe
names.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import measured_device
from benchmarks.random_models import Subject, bare_trainer, frozen_scalar, launch_of, new_learner
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import overridden
from rlhf_core.errors import RlhfError
from rlhf_core.models.precision import allow_tf32, weights_precision
from rlhf_core.ppo.reward_sources.source import reward_model_fn
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.runtime import distributed
from rlhf_core.sampling.sampler import Sampler, opened_sampler
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.storage.files import atomic_write_json
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.run_context import RunContext
from rlhf_extras.memory.architecture import Architecture, starting_architecture
from rlhf_extras.memory.command import PlanRequest
from rlhf_extras.memory.roofline import Roofline
from rlhf_extras.memory.workload import DataShape, Work, ppo_iteration

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = 1_000_000  # iterations: more than are made
PHASES = ("generation", "forward", "rewards", "update")


def main() -> int:
    """Measure, print a table, and exit 0; 1 for settings that cannot be run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ppo_throughput", description=__doc__
    )
    parser.add_argument("--profile", help="the recipe; the demo's if not given")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="may be repeated"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a config.json in place of the recipe's model"
    )
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--reply", type=int, default=256, help="tokens of each reply")
    parser.add_argument("--iterations", type=int, default=3, help="after one to warm up")
    parser.add_argument(
        "--threads", type=int, help="of each process on a CPU; all cores if not given"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the measured shares as JSON"
    )
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
    params = PlanRequest(
        ROOT, given.profile, given.set, ("ppo",), given.config, gpus=processes
    ).params
    allow_tf32(params.compute.tf32)
    subject = _subject(
        params, starting_architecture(params.base, ROOT, given.config), given.prompt, given.reply
    )
    precision = weights_precision(params.base.dtype)
    device = measured_device(getattr(torch, precision))
    times = _times(subject, given.iterations, work)
    seconds = times["seconds"]
    passes = ppo_iteration(
        subject.params, DataShape(given.prompt, given.reply, given.prompt + given.reply)
    )
    roofline = Roofline(
        subject.architecture,
        precision,
        launch_of(subject.params, "ppo").gradient_checkpointing,
        processes,
    )
    least = roofline.phases(passes, device)
    rows = subject.params.ppo.batch_size // processes
    return {
        "model": str(given.config or params.base.source),
        "precision": precision,
        "processes": processes,
        "rows": rows,
        "prompt": given.prompt,
        "reply": given.reply,
        "device": asdict(device),
        **times,
        "tokens_per_second": rows * (given.prompt + given.reply) / seconds["iteration"],
        "matmul_shares": {
            name: _flops(replace(roofline, recomputed=False), passes, name)
            / seconds[name]
            / device.flops
            for name in PHASES
        },
        "roofline_shares": {name: least[name] / seconds[name] for name in PHASES},
    }


def _flops(roofline: Roofline, passes: Sequence[Work], phase: str) -> float:
    """FLOP of the model on its tokens, what is computed twice counted once; of a generation those of
    its replies.
    """
    return sum(roofline.flops(one) for one in passes if one.phase == phase)


def _subject(params: Params, architecture: Architecture, prompt: int, reply: int) -> Subject:
    """What is run: the recipe's PPO without warm-up and checkpoints, on lengths of its own."""
    document = params.model_dump(mode="json", by_alias=True, exclude_unset=True)
    changes = {
        "ppo.iterations": ENDLESS,
        "ppo.warmup_iterations": 0,
        "ppo.max_new_tokens": reply,
        "ppo.min_new_tokens": 0,
        "ppo.checkpoint.every": ENDLESS,
    }
    return Subject("ppo", architecture, check_params(overridden(document, changes)), prompt, reply)


def _times(subject: Subject, iterations: int, work: Path) -> dict[str, Any]:
    """Make an iteration to warm up and ``iterations`` more; of several ranks all must call it.

    Returns:
        Median seconds of an iteration and of all its phases, the memory of the GPU if there is one, and
        by how much log-probabilities of sampler and trainer differed in the last iteration.
    """
    context = RunContext(work, launch=launch_of(subject.params, "ppo"))
    with opened_sampler(subject.params.ppo.sampler, work, Path()) as sampler:
        trainer = _trainer(subject, context, sampler)
        trainer.iterate()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        laps = []
        for _ in range(iterations):
            started = time.perf_counter()
            record = trainer.iterate()
            laps.append({"seconds_iteration": time.perf_counter() - started} | record.seconds)
    names = [name.removeprefix("seconds_") for name in laps[0]]
    return {
        "seconds": {name: median(lap[f"seconds_{name}"] for lap in laps) for name in names},
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "sampler_against_trainer": {
            key: value for key, value in record.metrics.items() if key.startswith("sampl")
        },
    }


def _trainer(subject: Subject, context: RunContext, sampler: Sampler) -> Trainer:
    """Policy, reference, critic, reward model and referee as the stage has them, each with weights
    of its own.
    """
    params, config, frozen = subject.params, subject.params.ppo, FrozenModels(context.launch)
    learner = new_learner(subject, context, frozen)
    limits = MicroBatchLimits(config.micro_batch_size, config.micro_batch_tokens)
    reward, referee = (
        reward_model_fn(frozen_scalar(subject, of.layers, frozen), limits)
        for of in (params.reward, params.referee)
    )
    prompts = [subject.ids(row, subject.prompt) for row in range(config.batch_size)]
    return bare_trainer(
        learner, reward, prompts, context, referee=referee, frozen=frozen, sampler=sampler
    )


def _table(found: Mapping[str, Any]) -> Table:
    device, rows = found["device"], found["rows"]
    title = (
        f"{found['model']} in {found['precision']}, {found['processes']} x {rows} replies of {found['reply']} tokens "
        f"to prompts of {found['prompt']}\n{device['name']}: {device['flops'] / 1e12:.3g} TFLOP/s, "
        f"{device['bandwidth'] / 1e9:.0f} GB/s"
    )
    table = Table(
        "phase",
        "seconds",
        "tokens/s per process",
        "of the matmul limit",
        "of the roofline",
        title=title,
    )
    tokens = rows * (found["prompt"] + found["reply"])
    for name in PHASES:
        seconds = found["seconds"][name]
        made = rows * found["reply"] if name == "generation" else tokens
        table.add_row(
            name, f"{seconds:.3f}", f"{made / seconds:.0f}", f"{found['matmul_shares'][name]:.1%}",
            f"{found['roofline_shares'][name]:.1%}",
        )  # fmt: skip
    for name, seconds in found["seconds"].items():
        if name not in (*PHASES, "iteration"):
            table.add_row(name, f"{seconds:.3f}", "", "", "")
    table.add_row(
        "iteration",
        f"{found['seconds']['iteration']:.3f}",
        f"{found['tokens_per_second']:.0f}",
        "",
        "",
    )
    if found["peak_bytes"] is not None:
        table.caption = f"peak {found['peak_bytes'] / (1 << 30):.1f} GiB"
    return table


if __name__ == "__main__":
    sys.exit(main())

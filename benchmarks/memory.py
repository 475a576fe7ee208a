"""``python -m benchmarks.memory``: the memory that `rlhf plan` estimates beside what the trainers keep alive.

On a CPU the bytes of live tensors are counted, on a GPU the allocator's own figure is taken. With ``--workspace DIR``
the stages themselves run for a few steps on the models and data of a finished workspace, which stays as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.memory_phases import CudaMemory, Subject, measure
from rlhf_core.config.loading.load import load_params, load_section
from rlhf_core.memory.assign import assigned
from rlhf_core.memory.command import Request, plan_of
from rlhf_core.memory.estimate import make_plan
from rlhf_core.memory.shapes import Shape
from rlhf_core.memory.tensor_memory import TensorMemory
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.stages.runtime.names import load_stage
from rlhf_core.training.run_context import RunContext

MIB = 1 << 20
STAGES = ("sft", "reward", "critic", "ppo")
FEW = {
    "sft": {"steps": 80, "eval_every": 80},
    "reward": {"steps": 40, "eval_every": 40},
    "critic": {"max_rollouts": 2},
    "ppo": {"iterations": 3, "warmup_iterations": 0},
    "evaluate": {},
}


def subjects() -> Iterator[Subject]:
    """The demo's model and batches with its longest rows, and a model of 100 million parameters on short ones."""
    params = load_params(Path(__file__).resolve().parents[1])
    yield Subject("demo", Shape(1024, 96, 256, 3, 4, 4, 24, True, 512), params, prompt=26, reply=55)
    small = {
        "base.dtype": "bfloat16",
        "sft.batch_size": 8,
        "sft.micro_batch_size": 4,
        "reward.batch.token_budget": 512,
        "critic.batch_size": 8,
        "ppo.batch_size": 8,
        "ppo.micro_batch_size": 4,
        "ppo.max_new_tokens": 16,
        "ppo.minibatches": 1,
        "ppo.ptx.batch_size": 4,
        "ppo.selection.batch_size": 8,
    }
    shape = Shape(32000, 768, 2048, 12, 12, 4, 64, True, 512)
    yield Subject("100 M, bfloat16", shape, assigned(params, small), prompt=16, reply=16)


def main() -> int:
    """Print one table per subject, or that of a workspace, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--workspace", type=Path, help="a workspace whose ppo stage has run")
    workspace = parser.parse_args().workspace
    if workspace is not None:
        _compare(f"stages of {workspace}", _of_workspace(workspace))
        return 0
    for subject in subjects():
        measured = measure(subject, STAGES)
        rows = [
            (f"{stage.stage}: {phase.name}", phase.use.total, measured[stage.stage][phase.name])
            for stage in make_plan(subject.recipe, STAGES).stages
            for phase in stage.phases
            if phase.name in measured[stage.stage]
        ]
        _compare(subject.name, rows)
    return 0


def _of_workspace(workspace: Path) -> list[tuple[str, int, int]]:
    plan = plan_of(Request(workspace.resolve(), stages=tuple(FEW)))
    return [(stage.stage, stage.peak.use.total, _run(stage.stage, workspace)) for stage in plan.stages]


def _run(name: str, workspace: Path) -> int:
    """The peak of a few steps of a stage, its outputs in a folder that is thrown away."""
    stage = load_stage(name)
    config = load_section(workspace, name, stage.config).model_copy(update=FEW[name])
    if name == "ppo":
        config = config.model_copy(update={"selection": config.selection.model_copy(update={"every": 3})})
    meter: Any = CudaMemory() if torch.cuda.is_available() else TensorMemory()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        inputs = Paths({key: workspace / path for key, path in stage.inputs.items()})
        outputs = {key: Path(folder) / path for key, path in stage.outputs.items()}
        for path in outputs.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(meter, TensorMemory):
            stack.enter_context(meter)
        with meter.phase(name):
            stage.run(config, inputs, Paths(outputs), RunContext(Path(folder) / "work"))
    return int(meter.peaks[name])


def _compare(title: str, rows: list[tuple[str, int, int]]) -> None:
    width = max(len(name) for name, _, _ in rows)
    print(f"{title}\n{'MiB'.ljust(width)}    planned   measured")
    for name, planned, found in rows:
        print(f"{name.ljust(width)} {planned / MIB:10.1f} {found / MIB:10.1f}  {planned / found - 1:+.1%}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.memory``: the memory that `rlhf plan` estimates beside what the trainers
keep alive.

On a CPU the bytes of live tensors are counted, on a GPU the allocator's own figure is taken. With
``--workspace DIR`` the stages themselves run for a few steps on the models and data of a finished
workspace, which stays as it is; with ``--process`` each runs in a process of its own, whose largest
resident size on Linux is compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The plan counts work space of libraries (32 MiB for each thread and stream) with the context, not
# with the phases.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")

from benchmarks.memory_phases import Meter, measure
from benchmarks.random_models import Subject
from rlhf_core.config.loading import check_params, load_params, load_section
from rlhf_core.config.profiles import overridden
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.stages.runtime.runner import load_stage
from rlhf_core.stages.runtime.threads import return_freed_memory
from rlhf_core.training.run_context import RunContext
from rlhf_extras.memory.architecture import Architecture, starting_architecture
from rlhf_extras.memory.command import PlanRequest
from rlhf_extras.memory.stages import plan_stages

ROOT = Path(__file__).resolve().parents[1]
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
    """The demo's model and batches with its longest rows, and a model of 100 million parameters on
    short ones.
    """
    params = load_params(ROOT)
    yield Subject("demo", starting_architecture(params.base, ROOT), params, prompt=26, reply=55)
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
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }  # fmt: skip
    document = params.model_dump(mode="json", by_alias=True, exclude_unset=True)
    changed = check_params(overridden(document, small))
    yield Subject("100 M, bfloat16", Architecture.of(config, "100 M"), changed, prompt=16, reply=16)


def main() -> int:
    """Print one table per subject, or that of a workspace, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--workspace", type=Path, help="a workspace whose ppo stage has run")
    parser.add_argument("--process", action="store_true", help="compare whole processes on a CPU")
    parser.add_argument(
        "--stage", action="append", choices=FEW, help="of the workspace; may be repeated"
    )
    options = parser.parse_args()
    if options.workspace is not None:
        rows = _of_workspace(options.workspace, options.stage or tuple(FEW), options.process)
        _compare(f"{'processes' if options.process else 'stages'} of {options.workspace}", rows)
        return 0
    for subject in subjects():
        measured = measure(subject, STAGES)
        rows = [
            (f"{stage.stage}: {name}", use.total, measured[stage.stage][name])
            for stage in plan_stages(subject.inputs, STAGES)
            for name, use in stage.phases.items()
            if name in measured[stage.stage]
        ]
        _compare(subject.name, rows)
    return 0


def _of_workspace(
    workspace: Path, names: Sequence[str], whole_process: bool
) -> list[tuple[str, int, int]]:
    rows = []
    for stage in PlanRequest(workspace.resolve(), stages=names).plans():
        if whole_process:
            assert stage.process is not None, f"{stage.stage} runs in several processes"
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                rows.append(
                    (
                        stage.stage,
                        stage.process,
                        pool.submit(peak_of_process, stage.stage, workspace).result(),
                    )
                )
        else:
            meter = Meter()
            with meter.memory, meter.phase(stage.stage):
                run_few_steps(stage.stage, workspace)
            rows.append((stage.stage, stage.peak, meter.peaks[stage.stage]))
    return rows


def peak_of_process(name: str, workspace: Path) -> int:
    """The largest resident size of this process after a few steps of a stage."""
    return_freed_memory()
    run_few_steps(name, workspace)
    largest = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert largest is not None
    return int(largest[1]) << 10


def run_few_steps(name: str, workspace: Path) -> None:
    """Run a stage for at most a few steps, its outputs in a folder that is thrown away."""
    stage = load_stage(name)
    config = load_section(workspace, name, stage.config)
    config = config.model_copy(
        update={key: min(steps, getattr(config, key)) for key, steps in FEW[name].items()}
    )
    if name == "ppo":
        config = config.model_copy(
            update={"selection": config.selection.model_copy(update={"every": 3})}
        )
    with tempfile.TemporaryDirectory() as folder:
        inputs = Paths({key: workspace / path for key, path in stage.inputs.items()})
        outputs = {key: Path(folder) / path for key, path in stage.outputs.items()}
        for path in outputs.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        stage.run(config, inputs, Paths(outputs), RunContext(Path(folder) / "work"))


def _compare(title: str, rows: list[tuple[str, int, int]]) -> None:
    width = max(len(name) for name, _, _ in rows)
    print(f"{title}\n{'MiB'.ljust(width)}    planned   measured")
    for name, planned, found in rows:
        print(
            f"{name.ljust(width)} {planned / MIB:10.1f} {found / MIB:10.1f}  {planned / found - 1:+.1%}"
        )
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())

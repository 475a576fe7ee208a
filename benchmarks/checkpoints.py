"""``python -m benchmarks.checkpoints``: what checkpoints cost a training, waited for and written in the background.

A random Llama is trained in float32 with AdamW on random tokens. Rounds of ``--every`` steps end without a checkpoint,
with one that is waited for until it is on the disk, and with one that is written while the next round trains; they are
made in turn, so that other work on the machine meets all three. The state and its moments take 12 bytes per parameter
on the disk, and once more in memory for the copy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.models.openblas_linear import use_openblas
from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.engine import LocalEngine

KINDS = ("none", "waited for", "in the background")
VOCABULARY, HEAD = 32_000, 64
WIDTHS = ((700, 2048), (200, 1024), (80, 768), (30, 512))  # from so many millions of parameters on


@dataclass(frozen=True)
class RunSizes:
    """The model, in millions of parameters, and the rounds of one measurement."""

    millions: int = 100
    rows: int = 4
    tokens: int = 128
    every: int = 10
    rounds: int = 3


@dataclass(frozen=True)
class Seconds:
    """Wall time and processor time of the process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def median(cls, values: Sequence[Seconds]) -> Seconds:
        """The median of each clock."""
        return cls(statistics.median(v.wall for v in values), statistics.median(v.cpu for v in values))

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def main() -> int:
    """Measure, print what a checkpoint adds to the steps and its share of their time, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    for name, default in asdict(RunSizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary folder if left out")
    given = vars(parser.parse_args())
    torch.set_num_threads(given["threads"])
    sizes = RunSizes(**{field: given[field] for field in asdict(RunSizes())})
    with tempfile.TemporaryDirectory(dir=given["folder"]) as folder:
        _measure(sizes, Path(folder))
    return 0


def _measure(sizes: RunSizes, folder: Path) -> None:
    engine = LocalEngine(new_model(sizes.millions), OptimizerConfig(lr=1e-4), 1_000_000)
    parameters = sum(parameter.numel() for parameter in engine.model.parameters())
    manager = CheckpointManager(folder)
    # Moments and buffers exist from the first step and the first checkpoint on.
    _train(engine, sizes, 1)
    _save(manager, engine)
    manager.finish()
    written = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    rounds: dict[str, list[Seconds]] = {kind: [] for kind in KINDS}
    copies: list[Seconds] = []
    for _ in range(sizes.rounds):
        for kind in KINDS:
            started = Seconds.now()
            if kind != "none":
                _save(manager, engine)
                copies.append(Seconds.now() - started)
            if kind == "waited for":
                manager.finish()
            _train(engine, sizes, sizes.every)
            # What the round was too short for counts too.
            manager.finish()
            rounds[kind].append(Seconds.now() - started)
    train = Seconds.median(rounds["none"])
    print(
        f"{parameters / 1e6:.0f} M parameters, checkpoint {written / 1e9:.2f} GB, {distributed.device()}, "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    )
    print(f"{sizes.every} steps of {sizes.rows * sizes.tokens} tokens: {train.wall:.2f} s, processor {train.cpu:.2f} s")
    print(f"{'checkpoint':<20}    wall  share  processor  share")
    costs = {"its copy": Seconds.median(copies)} | {kind: Seconds.median(rounds[kind]) - train for kind in KINDS[1:]}
    for kind, cost in costs.items():
        shares = (cost.wall / (train.wall + cost.wall), cost.cpu / (train.cpu + cost.cpu))
        print(f"{kind:<20} {cost.wall:7.2f} {shares[0]:6.1%} {cost.cpu:10.2f} {shares[1]:6.1%}")


def new_model(millions: int) -> LlamaForCausalLM:
    """A random Llama of about so many million parameters, embeddings tied."""
    hidden = next((width for least, width in WIDTHS if millions >= least), 256)
    per_layer = 4 * hidden**2 + 3 * hidden * 3 * hidden
    layers = max(1, round((millions * 1e6 - VOCABULARY * hidden) / per_layer))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    use_openblas(model)  # as loading a folder does
    return model


def _train(engine: LocalEngine, sizes: RunSizes, steps: int) -> None:
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (sizes.rows, sizes.tokens), device=distributed.device())
        engine.backward(engine.forward(partial(_loss, engine.model, ids)))
        engine.step()


def _loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _save(manager: CheckpointManager, engine: LocalEngine) -> None:
    state = engine.state()
    manager.save(engine.steps, state.pieces, state.meta, keep=1)


if __name__ == "__main__":
    sys.exit(main())

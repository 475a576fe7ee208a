"""``python -m benchmarks.float32_products``: linear layers in float32 by PyTorch's default and by OpenBLAS, in turn.

First the speed of single products, forward and backward with gradients of input and weight. Then, where stages use
OpenBLAS, forward and backward passes of a random Llama over batches of rows and widths drawn anew for each, and
the ratio of processor times.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.models.openblas_linear import FEWEST_ROWS, OpenBlasLinear, openblas_pays, use_openblas
from rlhf_core.runtime.machine import numpy_kernels, set_openblas_threads

SHAPES = ((96, 256), (256, 256), (256, 688), (688, 256))  # inputs and outputs
VOCABULARY, HEAD_DIM = 1024, 32


def main() -> int:
    """Measure, print the tables, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float32_products", description=__doc__)
    parser.add_argument("--rows", type=int, default=2688, help="rows of a single product")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256], help="widths of models of five layers")
    parser.add_argument("--passes", type=int, default=8, help="batches of one turn")
    parser.add_argument("--repeats", type=int, default=4, help="turns of each model")
    parser.add_argument("--threads", type=int, default=1, help="threads of a product")
    given = parser.parse_args()
    if given.rows < FEWEST_ROWS:
        parser.error(f"--rows {given.rows}: layers give products of fewer than {FEWEST_ROWS} rows to PyTorch")
    torch.set_num_threads(given.threads)
    set_openblas_threads(given.threads)
    print(f"OpenBLAS: kernels of {numpy_kernels()}; stages {'use it' if openblas_pays() else 'do not use it here'}")
    print(f"{given.rows} rows   GFLOP/s: default  OpenBLAS")
    for inputs, outputs in SHAPES:
        speeds = [gigaflops(layer, given.rows) for layer in both_layers(inputs, outputs)]
        print(f"{inputs:5d} x {outputs:<5d} {speeds[0]:12.0f} {speeds[1]:9.0f}", flush=True)
    if openblas_pays():
        print("parameters   seconds: default  OpenBLAS  ratio")
        for hidden in given.hidden:
            compare_models(hidden, given.passes, given.repeats)
    return 0


def compare_models(hidden: int, passes: int, repeats: int) -> None:
    """Print the processor seconds of passes by both libraries, in turn."""
    models = both_models(hidden)
    for model in models:
        passes_of(model, 2, seed=0)
    seconds = [0.0, 0.0]
    for turn in range(1, repeats + 1):
        seconds = [total + passes_of(model, passes, turn) for total, model in zip(seconds, models, strict=True)]
    size = sum(parameter.numel() for parameter in models[0].parameters())
    print(f"{size:10,d} {seconds[0]:17.2f} {seconds[1]:9.2f} {seconds[1] / seconds[0]:6.2f}", flush=True)


def both_layers(inputs: int, outputs: int) -> tuple[nn.Linear, nn.Linear]:
    """The same random layer twice, the second with OpenBLAS's products whether they pay or not."""
    plain, by_openblas = nn.Linear(inputs, outputs, bias=False), OpenBlasLinear(inputs, outputs, bias=False)
    by_openblas.load_state_dict(plain.state_dict())
    return plain, by_openblas


def both_models(hidden: int) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The same random model twice, the second as a stage would load it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 43 // 16, num_hidden_layers=5,
        num_attention_heads=hidden // HEAD_DIM, tie_word_embeddings=True,
    )  # fmt: skip
    plain = LlamaForCausalLM(config)
    by_openblas = copy.deepcopy(plain)
    use_openblas(by_openblas)
    return plain, by_openblas


def gigaflops(layer: nn.Linear, rows: int) -> float:
    """Operations of a product and its two gradients over the median time, in 1e9 a second."""
    x = torch.randn(rows, layer.in_features, requires_grad=True)
    gradient = torch.randn(rows, layer.out_features)
    seconds = median_seconds(lambda: layer(x).backward(gradient))
    return 6 * rows * layer.in_features * layer.out_features / seconds / 1e9


def median_seconds(function: Callable[[], None], calls: int = 20) -> float:
    """The median of ``calls`` after three that warm up."""
    times = []
    for _ in range(calls + 3):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def passes_of(model: LlamaForCausalLM, count: int, seed: int) -> float:
    """Processor seconds of ``count`` passes over batches that ``seed`` decides."""
    draw = random.Random(seed)
    started = time.process_time()
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (draw.randint(8, 16), draw.randint(40, 100)))
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())

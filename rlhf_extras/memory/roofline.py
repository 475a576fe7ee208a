"""The roofline of a stage's passes: the least time in which a device could make them, by its two
limits.

A pass is bound by matrix products (reading, training, the prompts of a generation) or by reading
weights and keys and values once per token (the rest of a generation). What is measured is stated as
a share of that. Source of the model: Williams, Waterman and Patterson 2009, "Roofline: An
Insightful Visual Performance Model for Multicore Architectures".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from rlhf_core.models.architecture import cache_sizes
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.dry_run import ModelVariant, model_size
from rlhf_extras.memory.workload import Work

BYTES = {"float32": 4, "bfloat16": 2}
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Device:
    """Limits of one process's device: products in FLOP/s, in the precision of the weights, and
    memory in bytes/s.
    """

    name: str
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class ModelCost:
    """What a model costs: ``linear`` parameters of its layers' products that a token passes and
    ``idle`` ones of experts that it does not, ``width`` of all query heads together.
    """

    linear: int
    layers: int
    width: int
    head: int
    cache_bytes: int
    weight_bytes: int
    idle: int = 0

    @classmethod
    def of(cls, architecture: Architecture, precision: Precision) -> ModelCost:
        """That of a language model; ``head`` are the parameters of its unembedding."""
        return _model_cost(architecture, precision)

    def forward(self, rows: float, length: float, scored: float = 0) -> float:
        """FLOP of a causal pass over sequences of ``length`` tokens, with logits at ``scored``
        positions of each.
        """
        layers = 2 * self.linear * length + 2 * self.layers * self.width * length**2
        return float(rows * (layers + 2 * self.head * scored))


@cache
def _model_cost(architecture: Architecture, precision: Precision) -> ModelCost:
    size = model_size(ModelVariant(architecture, "causal_lm", precision))
    config: Any = architecture.config()
    shared, head_width = cache_sizes(config)
    held = size.linear + size.experts
    passed = size.linear + size.chosen_experts
    return ModelCost(
        linear=passed,
        layers=config.num_hidden_layers,
        width=config.num_attention_heads * head_width,
        head=config.hidden_size * config.vocab_size,
        cache_bytes=2 * config.num_hidden_layers * shared * head_width * BYTES[precision],
        weight_bytes=(held + config.hidden_size * config.vocab_size) * BYTES[precision],
        idle=held - passed,
    )


@dataclass(frozen=True)
class Roofline:
    """The costs of one recipe's passes.

    Attributes:
        architecture: The starting model.
        precision: Of its weights.
        recomputed: Whether training computes activations twice (gradient checkpointing).
        processes: Ranks that divide the rows of each pass among themselves.
    """

    architecture: Architecture
    precision: Precision
    recomputed: bool = False
    processes: int = 1

    def model(self, work: Work) -> ModelCost:
        """The cost of the model that makes a pass."""
        return ModelCost.of(self.architecture.lower(work.layers), self.precision)

    def rows(self, work: Work) -> int:
        """Rows of one step that the busiest rank computes."""
        return -(-work.rows // self.processes)

    def flops(self, work: Work) -> float:
        """FLOP of one rank in all steps: a forward pass, and where the model is trained with
        ``recomputed`` a second one, gradients of activations, and of weights that are trained.
        """
        length = work.prompt + work.reply
        forward = self.model(work).forward(self.rows(work), length, scored=work.reply)
        passes = 1
        if work.kind == "train":
            passes = 2 + (not work.adapters) + self.recomputed
        return work.times * passes * forward

    def seconds(self, work: Work, device: Device) -> float:
        """The least seconds of one rank in all steps."""
        if work.kind == "sample":
            return work.times * self._generation(work, device)
        return self.flops(work) / device.flops

    def _generation(self, work: Work, device: Device) -> float:
        """Prompts in one pass; then each step of all rows reads weights, keys and values, or is
        bound by products.
        """
        model, rows = self.model(work), self.rows(work)
        prompt, reply = round(work.prompt), round(work.reply)
        step = model.forward(rows, 1, 1)
        decoding = 0.0
        for held in range(prompt, prompt + reply):
            read = model.weight_bytes + rows * held * model.cache_bytes
            attention = 4 * rows * model.layers * model.width * held
            decoding += max(read / device.bandwidth, (step + attention) / device.flops)
        return model.forward(rows, prompt) / device.flops + decoding

    def phases(self, work: Iterable[Work], device: Device) -> dict[str, float]:
        """The least seconds of each phase."""
        found: dict[str, float] = {}
        for one in work:
            found[one.phase] = found.get(one.phase, 0.0) + self.seconds(one, device)
        return found

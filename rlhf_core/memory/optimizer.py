"""Bytes of gradients and optimiser state on one GPU.

Per trained parameter, AdamW: plain torch keeps a gradient and two moments of the weight's own precision (in float32 4 +
8). DeepSpeed keeps a float32 copy of the weight and two float32 moments, 12 (Rajbhandari et al. 2020, section 3.1), and
sums gradients in float32, 4. ZeRO-1 shards the copy and the moments over the GPUs, ZeRO-2 and 3 the gradients too.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.memory.placement import Placement

# DeepSpeed's default ``reduce_bucket_size``, in elements: gradients wait there to be reduced together.
BUCKET_ELEMENTS = 500_000_000
MASTER_AND_MOMENTS = 12
FLOAT32 = 4


@dataclass(frozen=True)
class TrainingState:
    """Bytes on each GPU, and in host memory for it. ``buffers`` are DeepSpeed's; ``at_step`` exist during a step."""

    gradients: int
    optimizer: int
    buffers: int = 0
    at_step: int = 0
    host: int = 0


def training_state(trainable: int, placement: Placement) -> TrainingState:
    """State of ``trainable`` parameters: a whole model's, or those of its adapters and head."""
    if placement.engine == "local" or placement.zero == 0:
        return TrainingState(gradients=trainable * placement.element, optimizer=2 * trainable * placement.element)
    part = placement.share(trainable)
    gradients = (part if placement.zero >= 2 else trainable) * FLOAT32
    optimizer = part * MASTER_AND_MOMENTS
    buffers = min(trainable, BUCKET_ELEMENTS) * placement.element
    if not placement.offload_optimizer:
        # Before it steps, ZeRO copies the gradients of its part once more.
        return TrainingState(gradients, optimizer, buffers, part * FLOAT32)
    kept = 0 if placement.zero >= 2 else gradients
    weights = part * placement.element if placement.offload_parameters else 0
    return TrainingState(kept, 0, buffers, 0, host=optimizer + part * FLOAT32 + weights)

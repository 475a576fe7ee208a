"""Bytes of gradients and optimiser state on one GPU.

Per trained parameter, AdamW: in float32 4 (weight) + 4 (gradient) + 8 (two moments); in bfloat16 with DeepSpeed 2 + 2
+ 12 (float32 copy and two moments): Rajbhandari et al. 2020, section 3.1. ZeRO-1 shards the last term over the GPUs,
ZeRO-2 gradients too, ZeRO-3 weights too. Plain torch in bfloat16 keeps its moments in bfloat16: 2 + 2 + 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.plan.placement import Placement

# DeepSpeed's default ``reduce_bucket_size``, in elements: gradients wait there to be reduced together.
BUCKET_ELEMENTS = 500_000_000
# LoRA adapters are kept in float32 whatever the base model is in.
ADAPTER_ELEMENT = 4


@dataclass(frozen=True)
class TrainingState:
    """Bytes on each GPU, and in host memory for it. ``buffers`` are DeepSpeed's; ``at_step`` exist during a step."""

    gradients: int
    optimizer: int
    buffers: int = 0
    at_step: int = 0
    host: int = 0


def training_state(trainable: int, placement: Placement) -> TrainingState:
    """State of ``trainable`` parameters: a whole model's, or its adapters' with LoRA."""
    if placement.engine == "local":
        element = ADAPTER_ELEMENT if placement.lora_rank else placement.element
        return TrainingState(gradients=trainable * element, optimizer=2 * trainable * element)
    part = placement.share(trainable)
    gradients = (part if placement.zero_stage >= 2 else trainable) * placement.element
    optimizer = (part if placement.zero_stage >= 1 else trainable) * 12
    # Before it steps, ZeRO copies the gradients of its part to float32.
    state = TrainingState(gradients, optimizer, min(trainable, BUCKET_ELEMENTS) * placement.element, part * 4)
    if not placement.offload_optimizer:
        return state
    kept = 0 if placement.zero_stage >= 2 else gradients
    weights = part * placement.element if placement.offload_parameters else 0
    return TrainingState(kept, 0, state.buffers, 0, host=optimizer + part * 4 + weights)

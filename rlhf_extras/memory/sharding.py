"""What a dry run on one process cannot see: ZeRO's shares and buffers, offloading, 4-bit weights,
the GPU's own part.

ZeRO stages: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.config.params import Params
from rlhf_core.models.adapters import BLOCK
from rlhf_core.models.forward import LOGITS_BYTES
from rlhf_core.models.precision import weights_precision
from rlhf_core.training.engine.zero_config import BUCKET_ELEMENTS, zero_config
from rlhf_extras.memory.dry_run import NOTHING, MemoryUse, ModelSize

GIB, MIB = 1 << 30, 1 << 20
# The CUDA context with its libraries' work space, and the share that the allocator loses to
# fragments.
CONTEXT = 1 * GIB
FRAGMENTS = 0.05
FLOAT32 = 4
# AdamW under ZeRO keeps a float32 copy of each weight and two float32 moments (section 3.1).
MASTER_AND_MOMENTS = 3 * FLOAT32
# DeepSpeed's own default of ``stage3_max_live_parameters``.
MAX_LIVE_PARAMETERS = 1_000_000_000
# bitsandbytes: a float32 scale for 256 scales of 8 bits; per matrix the values of both codes and an
# offset.
OUTER_BLOCK = 256
CODE_TABLES = (16 + 256 + 1) * FLOAT32


def gib(size: float) -> str:
    """Bytes as GiB, or MiB where that is less than a tenth of one."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:.1f} MiB"


def usable_memory(gpu_gib: float) -> int:
    """Bytes that tensors may take of a GPU: its memory without the context, less what fragments
    cost.
    """
    return max(int((gpu_gib * GIB - CONTEXT) / (1 + FRAGMENTS)), 0)


@dataclass(frozen=True)
class ParallelLayout:
    """How one job spreads its models over GPUs.

    Attributes:
        gathers: Whether ZeRO 3 gathers a model in training whole for passes outside of training
            steps.
        from_host: Whether weights of ZeRO 3 go to the GPUs one after another, out of host memory.
    """

    engine: Literal["local", "deepspeed"] = "local"
    gpus: int = 1
    zero: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    frozen: Literal["device", "offload", "sharded"] = "device"
    bucket_elements: int = BUCKET_ELEMENTS
    overlap_comm: bool = True
    logits_bytes: int = LOGITS_BYTES
    gathers: bool = True
    from_host: bool = False

    @property
    def element(self) -> int:
        """Bytes of one weight."""
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype.itemsize

    def share(self, size: int) -> int:
        """A GPU's part of ``size`` things dealt out evenly, rounded up."""
        return -(-size // self.gpus)


def planned_precision(params: Params) -> Literal["float32", "bfloat16"]:
    """``base.dtype``, of which ``auto`` is that of this machine, or of a GPU where the plan is for
    one.
    """
    for_gpu = params.plan.gpu_memory_gb is not None and params.base.dtype == "auto"
    return "bfloat16" if for_gpu else weights_precision(params.base.dtype)


def parallel_layout(params: Params, stage: str, root: Path) -> ParallelLayout:
    """The layout of ``stage`` in the precision of the starting model; a DeepSpeed file lies
    relative to ``root``.

    Raises:
        ConfigError: DeepSpeed's engine would refuse the settings.
    """
    launches = {str(name): launch for name, launch in params.compute.launch.items()}
    launch, precision = launches.get(stage, LaunchConfig()), planned_precision(params)
    zero: Mapping[str, Any] = {}
    if launch.engine == "deepspeed":
        zero = zero_config(launch, getattr(torch, precision), None, root)["zero_optimization"]
    ppo, trains = params.ppo, params.policy.method == "ppo" and stage in ("critic", "ppo")
    elsewhere = (
        trains and ppo.sampler.kind != "local" and (stage == "critic" or ppo.policy_lora is None)
    )
    offloaded = {
        name: (zero.get(f"offload_{name}") or {}).get("device", "none")
        for name in ("optimizer", "param")
    }
    return ParallelLayout(
        engine=launch.engine,
        gpus=launch.ranks,
        zero=int(zero.get("stage", 0)),
        offload_optimizer=set(offloaded.values()) != {"none"},
        offload_parameters=offloaded["param"] != "none",
        precision=precision,
        gradient_checkpointing=launch.gradient_checkpointing,
        frozen=launch.frozen,
        bucket_elements=int(zero.get("reduce_bucket_size", BUCKET_ELEMENTS)),
        overlap_comm=bool(zero.get("overlap_comm", True)),
        logits_bytes=launch.logits_bytes,
        gathers=stage not in ("sft", "reward", "referee", "judge") and not elsewhere,
        from_host=launch.zero == 3 and (trains or stage == "sft"),
    )


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """What one model takes of each GPU.

    Attributes:
        parameters: Those that are its own, as a count.
        held: What it always holds. Gradients come and go with the phases, except where their memory
            lasts.
        whole: Its weights before anything is packed, sharded or moved away.
        loading: What it takes while it is loaded: all of that, or less where ranks take their
            shares at once.
        loaded: Of a trained one, its weights once loaded, and packed where they will be, but not
            sharded yet.
        host: Bytes in host memory for each GPU.
        gradients_kept: Bytes of gradient that stay for each one that a backward pass makes.
        step: Gradients of a whole optimiser step beyond what is always held, and what exists during
            it alone.
        at_work: Weights on top outside of training steps, and of a frozen one during rollouts and
            selection.
        running: Weights on top while it is trained, and of a frozen one while it runs itself.
    """

    parameters: int
    held: MemoryUse
    whole: MemoryUse
    loading: MemoryUse
    loaded: MemoryUse = NOTHING
    host: int = 0
    gradients_kept: float = 1.0
    step: MemoryUse = NOTHING
    at_work: MemoryUse = NOTHING
    running: MemoryUse = NOTHING


def trained_footprint(
    size: ModelSize, layout: ParallelLayout, packed: bool = False, owns_backbone: bool = True
) -> ModelFootprint:
    """A model in training.

    Plain torch keeps float32 masters of low-precision weights, sums gradients in float32 and trains
    float32 adapters; DeepSpeed casts adapters to the model's precision and keeps masters of them
    too.

    ZeRO-1 shards master copies and moments over the GPUs, ZeRO-2 the gradients too, ZeRO-3 the
    weights too, which it gathers for passes and whose gradients' memory it keeps from step to step.
    DeepSpeed sums gradients in float32, and before it steps copies those of its part once more. Its
    buckets of gradients are filled from float32 sums by ZeRO-1; ZeRO-2 fills a second one while the
    first is reduced, if the two overlap.

    Args:
        size: The whole model's.
        layout: How the job spreads it.
        packed: Whether its frozen linear layers are in 4 bits. Passes unpack one matrix at a time.
        owns_backbone: False for adapters and a head on weights that another model holds.
    """
    element, parameters = layout.element, size.parameters if owns_backbone else size.trainable
    linear = size.linear if packed else 0
    plain = parameters - linear
    whole = size.weights if owns_backbone else size.trainable_weights
    packed_bytes = packed_size(size) if packed else 0
    unpacked = size.largest * element + size.largest // BLOCK * FLOAT32 if packed else 0
    weights = loaded = whole - linear * element + packed_bytes
    at_work = running = unpacked
    gradients, optimizer, host, at_step, buckets = size.gradients, size.optimizer, 0, 0, 0
    if layout.zero > 0:
        part = layout.share(size.trainable)
        gradients = (part if layout.zero >= 2 else size.trainable) * FLOAT32
        optimizer, at_step = part * MASTER_AND_MOMENTS, part * FLOAT32
        buckets = min(size.trainable, layout.bucket_elements) * (
            FLOAT32 if layout.zero == 1 else element
        )
        if layout.zero == 2 and layout.overlap_comm:
            buckets *= 2
        if layout.offload_optimizer:
            host, optimizer, at_step = optimizer + at_step, 0, 0
            gradients = 0 if layout.zero >= 2 else gradients
        if layout.zero == 3:
            weights = packed_bytes + layout.share(plain) * element
            running = unpacked + min(plain, MAX_LIVE_PARAMETERS) * element
            at_work = unpacked + plain * element if layout.gathers else running
        if layout.offload_parameters:
            weights, host = packed_bytes, host + part * element
    lasting = gradients if layout.zero == 3 else 0
    return ModelFootprint(
        parameters=parameters,
        held=MemoryUse(weights=weights, gradients=lasting, optimizer=optimizer, other=buckets),
        whole=MemoryUse(weights=whole),
        loading=MemoryUse(
            weights=weights + size.largest * element if layout.from_host and not packed else whole
        ),
        loaded=MemoryUse(weights=loaded),
        host=host,
        gradients_kept=(gradients - lasting) / size.trainable_weights if size.trainable else 0.0,
        step=MemoryUse(gradients=gradients - lasting, other=at_step),
        at_work=MemoryUse(weights=at_work),
        running=MemoryUse(weights=running),
    )


def frozen_footprint(
    parameters: int, layout: ParallelLayout, whole: int | None = None
) -> ModelFootprint:
    """A model that is only read: on the device, in host memory between its phases, or sharded and
    gathered to run.

    ``whole`` are its bytes where some of its parameters have another precision than the others.
    """
    weights = MemoryUse(weights=whole if whole is not None else parameters * layout.element)
    if layout.frozen == "offload":
        host = weights.total
        return ModelFootprint(
            parameters=parameters,
            held=NOTHING,
            whole=weights,
            loading=weights,
            host=host,
            at_work=weights,
        )
    if layout.frozen == "sharded":
        share = MemoryUse(
            weights=0 if layout.offload_parameters else layout.share(parameters) * layout.element
        )
        gathered = MemoryUse(weights=min(parameters, MAX_LIVE_PARAMETERS) * layout.element)
        loading = share + gathered  # of which one weight is whole at a time
        return ModelFootprint(
            parameters=parameters, held=share, whole=weights, loading=loading, running=gathered
        )
    return ModelFootprint(parameters=parameters, held=weights, whole=weights, loading=weights)


def packed_size(size: ModelSize) -> int:
    """Bytes of linear layers in NF4 (models/adapters.py): 4 bits a parameter, 8 for each block of
    them, and tables.
    """
    scales = size.linear // BLOCK + size.linear // (BLOCK * OUTER_BLOCK) * FLOAT32
    return size.linear // 2 + scales + size.matrices * CODE_TABLES

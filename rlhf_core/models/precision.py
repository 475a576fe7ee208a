"""In which precision a model multiplies: that of its weights, or TF32 for float32 weights on a GPU that may use it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from rlhf_core.models.float32_head import LOW_PRECISION
from rlhf_core.runtime import distributed

Precision = Literal["float64", "float32", "tf32", "bfloat16"]


def allow_tf32(allowed: bool) -> None:
    """Let float32 matrix products of this process's GPU use TF32, or forbid it. A CPU is left as it is.

    TF32 rounds the factors to 11 significant bits (float32 has 24) and adds up in float32.
    """
    if distributed.device().type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed


def weights_precision(dtype: Literal["float32", "bfloat16", "auto"]) -> Literal["float32", "bfloat16"]:
    """``base.dtype``, of which ``auto`` is bfloat16 where this process's device has instructions for its products.

    A processor without them emulates bfloat16 at a fraction of float32's speed.
    """
    if dtype != "auto":
        return dtype
    if distributed.device().type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return "bfloat16" if native else "float32"


def matmul_precision(model: nn.Module) -> Precision:
    """The precision of the products inside ``model``, by its first weight, which is never an adapter's.

    float16 counts as bfloat16 here, the coarser of the two.
    """
    weight = next(model.parameters())
    if weight.dtype in LOW_PRECISION:
        return "bfloat16"
    if weight.dtype == torch.float64:
        return "float64"
    tf32 = weight.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "float32"

"""What is known of the GPUs and of the data, for estimating memory. It never makes a stage stale."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from rlhf_core.config.model import Strict


class PlanConfig(Strict):
    """``gpu_memory_gb`` is the memory of one GPU in GiB; where it is given, a stage that cannot fit is not submitted.

    ``prompt_tokens`` and ``ptx_tokens`` are the longest prompt of rollouts and text of ptx, to plan with until the
    workspace's data are there to measure (null: as long as ``validate``'s limits allow).
    """

    gpu_memory_gb: PositiveFloat | None = Field(default=None, strict=False)
    prompt_tokens: PositiveInt | None = None
    ptx_tokens: PositiveInt | None = None

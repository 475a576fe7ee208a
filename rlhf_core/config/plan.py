"""What the training stages will run on, for estimating their memory. It never makes a stage stale."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rlhf_core.config.model import Strict


class PlanConfig(Strict):
    """``gpu_memory_gb`` is the memory of one GPU in GiB; where it is given, a stage that cannot fit is not submitted.

    ``engine: local`` keeps whole models on every GPU, ``deepspeed`` shards them by ``zero_stage``. ``precision`` is
    that of the weights (null: ``base.dtype``). ``offload`` moves optimiser state (``all``: parameters too) to host
    memory. ``frozen`` says where models that are not trained live: on every GPU, sharded over them, or in host memory
    until used. ``prompt_tokens`` is the longest prompt of rollouts (null: from the data, or ``validate``'s limits).
    """

    gpus: PositiveInt = 1
    gpu_memory_gb: PositiveFloat | None = Field(default=None, strict=False)
    engine: Literal["local", "deepspeed"] = "local"
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: Literal["none", "optimizer", "all"] = "none"
    precision: Literal["float32", "bfloat16"] | None = None
    gradient_checkpointing: bool = False
    lora_rank: PositiveInt | None = None
    frozen: Literal["on_device", "sharded", "offloaded"] = "on_device"
    prompt_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _consistent(self) -> PlanConfig:
        if self.engine == "local" and (self.zero_stage or self.offload != "none"):
            raise ValueError("zero_stage and offload are DeepSpeed's; set engine deepspeed")
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError("offload optimizer needs zero_stage 1, 2 or 3")
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError("offload all moves parameters too, which only zero_stage 3 can")
        if self.frozen == "sharded" and (self.engine == "local" or self.gpus == 1):
            raise ValueError("frozen sharded spreads models over GPUs: it needs engine deepspeed and more than one GPU")
        return self

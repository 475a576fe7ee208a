"""What memory depends on besides the model: engine, GPUs, sharding, precision. The one place that reads it off params.

ZeRO stages: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core.config.load import Params
from rlhf_core.config.plan import PlanConfig
from rlhf_core.errors import ConfigError

ELEMENT = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Placement:
    """How one job spreads its models. ``attention``: the ``eager`` kernel keeps its matrix of scores, ``sdpa`` not."""

    engine: Literal["local", "deepspeed"] = "local"
    gpus: int = 1
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    frozen: Literal["on_device", "sharded", "offloaded"] = "on_device"
    attention: Literal["sdpa", "eager"] = "sdpa"

    @property
    def element(self) -> int:
        """Bytes of one weight and of one activation."""
        return ELEMENT[self.precision]

    def share(self, size: int) -> int:
        """A GPU's part of ``size`` things dealt out evenly, rounded up."""
        return -(-size // self.gpus)


def placement_of(params: Params) -> Placement:
    """The placement that params.yaml describes."""
    plan = params.plan
    return Placement(
        engine=plan.engine,
        gpus=plan.gpus,
        zero_stage=plan.zero_stage,
        offload_optimizer=plan.offload != "none",
        offload_parameters=plan.offload == "all",
        precision=plan.precision or params.base.dtype,
        gradient_checkpointing=plan.gradient_checkpointing,
        lora_rank=plan.lora_rank or 0,
        frozen=plan.frozen,
    )


def with_options(params: Params, options: dict[str, Any]) -> Params:
    """``params`` with the options of the command line that were given (not None) laid over its ``plan`` section.

    A ZeRO stage or an offload implies DeepSpeed. ``ConfigError`` when the result contradicts itself.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("zero_stage") or given.get("offload", "none") != "none":
        given.setdefault("engine", "deepspeed")
    try:
        plan = PlanConfig.model_validate({**params.plan.model_dump(), **given})
    except ValueError as error:
        reasons = "; ".join(_reason(problem) for problem in getattr(error, "errors", list)())
        raise ConfigError(f"plan: {reasons or error}") from error
    return params.model_copy(update={"plan": plan})


def _reason(problem: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{name}: {message}" if name else message

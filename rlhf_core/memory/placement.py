"""What memory depends on besides the model: engine, GPUs, sharding, precision. The one place that reads it off params.

ZeRO stages: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.launch import LaunchConfig
from rlhf_core.config.loading.load import Params
from rlhf_core.files import read_json

ELEMENT = {"float32": 4, "bfloat16": 2}
# DeepSpeed's stage where a launch names none: training.engine.zero_config.
DEFAULT_ZERO = 2


@dataclass(frozen=True)
class Placement:
    """How one job spreads its models. ``attention``: the ``eager`` kernel keeps its matrix of scores, ``sdpa`` not."""

    engine: Literal["local", "deepspeed"] = "local"
    gpus: int = 1
    zero: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    frozen: Literal["device", "offload", "sharded"] = "device"
    attention: Literal["sdpa", "eager"] = "sdpa"

    @property
    def element(self) -> int:
        """Bytes of one weight and of one activation."""
        return ELEMENT[self.precision]

    def share(self, size: int) -> int:
        """A GPU's part of ``size`` things dealt out evenly, rounded up."""
        return -(-size // self.gpus)


def placement_of(params: Params, stage: str, root: Path) -> Placement:
    """Where ``compute.launch`` places ``stage``, in the precision of the starting model. A DeepSpeed file starts at
    ``root``."""
    launches: Mapping[str, LaunchConfig] = {str(name): launch for name, launch in params.compute.launch.items()}
    launch = launches.get(stage, LaunchConfig())
    zero = _zero_settings(launch, root)
    offloaded = {name: bool(zero.get(name)) and zero[name].get("device") != "none" for name in ("optimizer", "param")}
    return Placement(
        engine=launch.engine,
        gpus=launch.ranks,
        zero=int(zero.get("stage", 0)),
        offload_optimizer=offloaded["optimizer"] or offloaded["param"],
        offload_parameters=offloaded["param"],
        precision=params.base.dtype,
        gradient_checkpointing=launch.gradient_checkpointing,
        frozen=launch.frozen,
    )


def _zero_settings(launch: LaunchConfig, root: Path) -> dict[str, Any]:
    """``stage``, and ``optimizer`` and ``param`` with the device that they are offloaded to."""
    if launch.engine == "local":
        return {}
    if launch.deepspeed is not None:
        given = read_json(root / launch.deepspeed).get("zero_optimization", {})
        return {
            "stage": given.get("stage", 0),
            **{name: given.get(f"offload_{name}") for name in ("optimizer", "param")},
        }
    cpu = {"device": "cpu"}
    return {
        "stage": DEFAULT_ZERO if launch.zero is None else launch.zero,
        "optimizer": cpu if launch.offload in ("optimizer", "parameters") else None,
        "param": cpu if launch.offload == "parameters" else None,
    }

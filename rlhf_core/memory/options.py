"""The command line's options as settings of the stages that are planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.memory.trials import ADAPTERS

# Stages that compute.launch knows: the evaluation runs in one process.
LAUNCHED = ("sft", "reward", "referee", "critic", "ppo")


@dataclass(frozen=True)
class Options:
    """None where not given. ``bf16``: weights in bfloat16, or (False) float32."""

    gpus: int | None = None
    gpu_memory: float | None = None
    zero: int | None = None
    offload: str | None = None
    frozen: str | None = None
    gradient_checkpointing: bool | None = None
    bf16: bool | None = None
    lora_rank: int | None = None
    prompt_tokens: int | None = None

    def settings(self, stages: Sequence[str]) -> dict[str, Any]:
        """Settings by path. A ZeRO stage, an offload or sharded frozen models imply DeepSpeed."""
        found: dict[str, Any] = {
            "plan.gpu_memory_gb": self.gpu_memory,
            "plan.prompt_tokens": self.prompt_tokens,
            "base.dtype": None if self.bf16 is None else "bfloat16" if self.bf16 else "float32",
        }
        sharding = self.zero is not None or self.offload is not None or self.frozen == "sharded"
        launch = {
            "engine": "deepspeed" if sharding else None,
            "processes": self.gpus,
            "zero": self.zero,
            "offload": self.offload,
            "frozen": self.frozen,
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        for stage in stages:
            if stage in LAUNCHED:
                found |= {f"compute.launch.{stage}.{name}": value for name, value in launch.items()}
            found |= {f"{path}.rank": self.lora_rank for path in ADAPTERS.get(stage, ())}
        return {path: value for path, value in found.items() if value is not None}

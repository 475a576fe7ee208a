"""DeepSpeed's configuration.

What the launch settings or a file of the user's say, and what the engine owns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import ConfigError
from rlhf_core.storage.files import read_json

# Set from the stage's own parameters; other values in a file would change the numbers.
OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "prescale_gradients",
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
    "amp",
    "torch_autocast",
)

# Elements of a bucket of gradients that are reduced together: 100 MB in bfloat16. DeepSpeed's own
# 500 million take ten times the memory, twice where communication overlaps, and leave nothing to
# overlap in models of less than that.
BUCKET_ELEMENTS = 50_000_000


def zero_config(
    launch: LaunchConfig, dtype: torch.dtype, max_grad_norm: float | None, folder: Path
) -> dict[str, Any]:
    """DeepSpeed's configuration for a trained model.

    What the launch settings say, and this project's defaults of bucket size and ``overlap_comm``.

    ZeRO 0 and 1 reduce gradients once a step, in DeepSpeed's ``step``; 2 and 3 in every backward
    pass, each bucket as soon as it is full.

    Args:
        folder: Folder that a file named by ``launch.deepspeed`` is relative to.

    Raises:
        ConfigError: The file sets what the engine owns or what its stage cannot do, or the stage
            cannot train ``dtype``.
    """
    if launch.deepspeed is not None:
        config = _from_file(folder / launch.deepspeed)
    else:
        config = {
            "zero_optimization": {
                "stage": 2 if launch.zero is None else launch.zero,
                **_offloaded(launch),
            }
        }
    zero = config.setdefault("zero_optimization", {})
    stage, low = int(zero.setdefault("stage", 0)), dtype == torch.bfloat16
    if low and stage == 0:
        raise ConfigError(
            "zero 0 keeps no float32 master weights for a bfloat16 model; use zero 1, 2 or 3"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"engine deepspeed trains float32 and bfloat16 models, not {dtype}; see base.dtype"
        )
    if stage < 2 and zero.get("overlap_comm"):
        raise ConfigError(
            f"{launch.deepspeed} sets overlap_comm with ZeRO stage {stage}, which reduces gradients once, after the "
            "last backward pass of a step; leave it out, or use stage 2 or 3"
        )
    zero.setdefault("reduce_bucket_size", BUCKET_ELEMENTS)
    zero.setdefault("overlap_comm", stage >= 2)
    settings = config | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Losses are already divided by the totals of the step, and the trainer decides when it
        # ends.
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if max_grad_norm is None or stage == 0 else max_grad_norm,
        "bf16": {"enabled": low, "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if low:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def frozen_config(launch: LaunchConfig, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration for a frozen model.

    Weights sharded, and offloaded where parameters are.
    """
    offloaded = {
        name: place for name, place in _offloaded(launch).items() if name == "offload_param"
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, **offloaded},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }


def _offloaded(launch: LaunchConfig) -> dict[str, Any]:
    names = {
        "optimizer": ["offload_optimizer"],
        "parameters": ["offload_optimizer", "offload_param"],
    }
    return {name: {"device": "cpu"} for name in names.get(launch.offload or "", [])}


def _from_file(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    owned = [key for key in OWNED if key in config]
    if owned:
        raise ConfigError(
            f"{path} sets {', '.join(owned)}: batch sizes, optimiser, clipping and precision come from params.yaml; "
            "leave them out"
        )
    return config

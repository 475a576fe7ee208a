"""Random state: independent streams derived from one seed, and the state of the process's generators."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_core.runtime import distributed


def derive_seed(seed: int, *names: str | int) -> int:
    """Derive the seed, in [0, 2^63), of a named stream such as ``derive_seed(1, "sft", "order")``.

    Streams of different names are independent.
    """
    text = "|".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (on all devices) of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of Python's, NumPy's and torch's generators, as ``(tensors, JSON values)``."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "rng.python": torch.tensor(internal, dtype=torch.int64),
        "rng.numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "rng.torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    meta = {
        "python": [version, gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(cached)],
    }
    return tensors, meta


def set_rng_state(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` returned on rank 0, on every rank.

    GPU generators are restored where the number of GPUs is the same.
    """
    tensors = distributed.broadcast_tensors_from_rank0({k: v for k, v in tensors.items() if k.startswith("rng.")})
    version, gauss = meta["python"]
    random.setstate((version, tuple(tensors["rng.python"].tolist()), gauss))
    name, position, has_gauss, cached = meta["numpy"]
    keys = tensors["rng.numpy"].numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["rng.torch"])
    devices = [tensors[key] for key in sorted(k for k in tensors if k.startswith("rng.cuda."))]
    if torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(devices)

"""Random state: streams derived from one seed, and the process's generators."""

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
    """State of this rank's generators, as ``(tensors, JSON values)``.

    Those of Python, NumPy and torch's CPU are the same on all ranks, and given by rank 0 alone. A
    GPU's has the rank in its name.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {}
    if distributed.is_rank_zero():
        tensors = {
            "rng.python": torch.tensor(internal, dtype=torch.int64),
            "rng.numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "rng.torch": torch.get_rng_state(),
        }
    if distributed.device().type == "cuda":
        tensors[f"rng.cuda.{distributed.rank()}"] = torch.cuda.get_rng_state(distributed.device())
    meta = {
        "python": [version, gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(cached)],
    }
    return tensors, meta


def set_rng_state(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Restore what all ranks gave as :func:`rng_state`.

    A GPU's generator stays where its rank gave none.
    """
    version, gauss = meta["python"]
    random.setstate((version, tuple(tensors["rng.python"].tolist()), gauss))
    name, position, has_gauss, cached = meta["numpy"]
    keys = tensors["rng.numpy"].numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["rng.torch"])
    own = tensors.get(f"rng.cuda.{distributed.rank()}")
    if own is not None and distributed.device().type == "cuda":
        torch.cuda.set_rng_state(own, distributed.device())

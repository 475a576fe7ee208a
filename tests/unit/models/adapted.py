"""Adapters on the tiny policy: their settings, a few steps of training, and logits to compare."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor
from unit.ppo.tiny import Tiny

from rlhf_core.config.model import LoraConfig, OptimizerConfig
from rlhf_core.training.engine.base import LocalEngine

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed: pip install 'rlhf-pipeline[lora]'",
)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: pip install 'rlhf-pipeline[4bit]'",
)
LORA = LoraConfig(rank=2, alpha=4)
NF4 = LoraConfig(rank=2, alpha=4, quantize="nf4")
IDS = torch.arange(12).view(2, 6)


def logits(model: object) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.clone()  # type: ignore[operator]


def train_adapters(tiny: Tiny) -> None:
    """A few steps of the policy's adapters."""
    engine = LocalEngine(tiny.policy, OptimizerConfig(lr=0.05), 5)
    for _ in range(5):
        engine.backward(engine.forward(lambda: tiny.policy(input_ids=IDS).logits.square().mean()))
        engine.step()

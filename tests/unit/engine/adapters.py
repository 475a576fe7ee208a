"""Adapters, on whole and on 4-bit weights, under any engine: trained, switched off for the reference, and merged."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from unit.engine import cases
from unit.ppo.tiny import make_tiny

from rlhf_core.config.model import LoraConfig
from rlhf_core.models.adapters import WithoutAdapters, add_adapters, merge_adapters
from rlhf_core.runtime import distributed
from rlhf_core.training.engine import Engine

LORA = {"whole": LoraConfig(rank=2, alpha=4), "nf4": LoraConfig(rank=2, alpha=4, quantize="nf4")}
IDS = torch.arange(12).view(2, 6)
STEPS = 3


def with_adapters(folder: Path, key: str, make: cases.MakeEngine) -> None:
    """A few steps on rows shared by the ranks; logits of policy and reference, and of the model that is released."""
    for kind, lora in LORA.items():
        model = make_tiny().policy
        add_adapters(model, lora, seed=5)
        before = logits(model)
        engine = make(model, cases.optimizer(0.1), "policy")
        steps(engine)
        with engine.gathered_parameters():
            reference, inside = logits(WithoutAdapters(model)), logits(model)
        released = engine.release()
        if distributed.is_rank_zero():
            merge_adapters(released)
            names = {f"weight.{name}": weight.detach() for name, weight in released.named_parameters()}
            found = {"before": before, "reference": reference, "inside": inside, "released": logits(released)}
            cases.write_result(folder, f"adapters-{kind}-{key}", found | names, {})


def steps(engine: Engine) -> None:
    """Each rank takes its share of the two rows."""
    rows = IDS[distributed.rank() :: distributed.world_size()]
    for _ in range(STEPS):
        loss = engine.forward(lambda: engine.model(input_ids=rows).logits.square().sum())
        engine.backward(loss / 100)
        engine.step()


@torch.no_grad()
def logits(model: object) -> Tensor:
    return model(input_ids=IDS).logits.clone()  # type: ignore[operator]

"""A policy as a Hugging Face folder without adapters, for a server to load its weights from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.adapters.lora import adapted_layers
from rlhf_core.models.io import quiet
from rlhf_core.storage.files import atomic_dir


def save_merged(policy: PreTrainedModel, folder: Path) -> None:
    """Write config and weights of ``policy`` to ``folder``, which is replaced at once; the policy is left as it is."""
    with atomic_dir(folder) as building, quiet():
        policy.save_pretrained(building, state_dict=merged_weights(policy))


@torch.no_grad()
def merged_weights(policy: PreTrainedModel) -> dict[str, Tensor]:
    """All weights by the names that they have without adapters; adapters are merged in the weight's precision."""
    weights: dict[str, Tensor] = policy.state_dict()
    for name, layer in adapted_layers(policy):
        base = layer.get_base_layer()
        weight: Tensor = base.weight
        for adapter in () if layer.disable_adapters else layer.active_adapters:
            delta = layer.get_delta_weight(adapter)
            weight = weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta
        weights = {key: tensor for key, tensor in weights.items() if not key.startswith(f"{name}.")}
        weights[f"{name}.weight"] = weight.to(base.weight.dtype)
        if base.bias is not None:
            weights[f"{name}.bias"] = base.bias
    return weights

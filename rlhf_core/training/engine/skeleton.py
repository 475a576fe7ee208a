"""A model's structure without its weights, to be filled again once an engine that sharded them is done."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlhf_core.errors import ModelError


class Skeleton:
    """A copy of a model with empty parameters. Tied parameters stay tied; buffers are copied."""

    def __init__(self, model: nn.Module) -> None:
        empty = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        self.model = copy.deepcopy(model, dict(empty))

    def filled(self, weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
        """The model with ``weights`` (by parameter name) on ``device``; without weights it stays empty.

        ``ModelError`` for a weight of another shape, such as a shard.
        """
        full = {}
        for name, parameter in self.model.named_parameters():
            if name not in weights:
                continue
            if weights[name].shape != parameter.shape:
                found, wanted = tuple(weights[name].shape), tuple(parameter.shape)
                raise ModelError(f"the weight {name} was gathered with shape {found} instead of {wanted}")
            full[id(parameter)] = nn.Parameter(weights[name].to(device), requires_grad=parameter.requires_grad)
        for module in self.model.modules():
            for name, empty in module._parameters.items():
                if empty is not None and id(empty) in full:
                    module._parameters[name] = full[id(empty)]
        return self.model.eval()

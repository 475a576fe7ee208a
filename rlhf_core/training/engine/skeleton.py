"""A model's structure without weights, filled again when an engine that sharded them has finished."""

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
        """Return the model with ``weights`` (by parameter name) on ``device``; parameters without a weight stay empty.

        Raises:
            ModelError: A weight has another shape, as a shard has.
        """
        full = {}
        for name, parameter in self.model.named_parameters():
            if name not in weights:
                continue
            if weights[name].shape != parameter.shape:
                gathered, expected = tuple(weights[name].shape), tuple(parameter.shape)
                raise ModelError(f"the weight {name} was gathered with shape {gathered} instead of {expected}")
            full[id(parameter)] = nn.Parameter(weights[name].to(device), requires_grad=parameter.requires_grad)
        for module in self.model.modules():
            for name, empty in module._parameters.items():
                if empty is not None and id(empty) in full:
                    module._parameters[name] = full[id(empty)]
        return self.model.eval()

"""The frozen lower layers of a policy that trains adapters above them, computed once for policy and reference.

The reference is the policy with its adapters off. Below the lowest adapted layer both compute the same numbers from the
same tokens, so the second pass takes what the first left there: the same bits, without its work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.models.adapters.lora import WithoutAdapters, adapted_layers
from rlhf_core.models.adapters.lower_layers import decoder_layers


class FrozenLowerLayers:
    """What the layers below all adapters put out in a pass, for another pass over the same tokens.

    Without such layers, or where the reference is a model of its own, both passes are whole ones.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._output: Any = None

    @classmethod
    def shared_by(cls, policy: PreTrainedModel, reference: object) -> FrozenLowerLayers:
        """Those that ``reference`` shares with ``policy``: none unless it is the policy with its adapters off."""
        same = isinstance(reference, WithoutAdapters) and reference.model is policy
        # Layers that read the keys and values of lower ones cannot do without these.
        reads_lower = getattr(policy.config.get_text_config(), "num_kv_shared_layers", 0) if same else 0
        layers = decoder_layers(policy) if same and not reads_lower else None
        if layers is None:
            return cls([])
        adapted = {id(module) for _, module in adapted_layers(policy)}
        is_adapted = [any(id(module) in adapted for module in layer.modules()) for layer in layers]
        lowest = is_adapted.index(True) if any(is_adapted) else 0
        # What is adapted outside of the layers, such as an embedding, is below all of them.
        inside = {id(module) for layer in layers for module in layer.modules()}
        return cls(list(layers)[:lowest] if adapted <= inside else [])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep what the highest of the layers puts out in the pass inside."""
        if not self._layers:
            yield
            return

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._output = output

        hook = self._layers[-1].register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Take what was recorded in place of computing the layers, in one pass over the same tokens; no gradients."""
        if self._output is None or torch.is_grad_enabled():
            yield
            return
        output, self._output = self._output, None
        forwards = [(layer, vars(layer).get("forward")) for layer in self._layers]
        try:
            for layer in self._layers:
                vars(layer)["forward"] = lambda *_, **__: output
            yield
        finally:
            for layer, own in forwards:
                del vars(layer)["forward"]
                if own is not None:
                    vars(layer)["forward"] = own

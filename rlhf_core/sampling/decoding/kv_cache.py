"""A key-value cache that writes new tokens into buffers allocated in advance, instead of copying itself at each token.

Shapes: B sequences, K key-value heads, L tokens held so far, D head width.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

# Tokens by which buffers grow: short replies allocate little, and a long one is copied once in so many tokens.
BLOCK = 64


class BlockLayer(DynamicLayer):
    """Keys and values of one layer, views (B, K, L, D) of buffers whose length is a multiple of :data:`BLOCK`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, K, new, D); return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            assert self.keys is not None and self.values is not None
            self._buffers = _longer(self.keys, key_states, end), _longer(self.values, value_states, end)
        keys, values = self._buffers
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences only."""
        if self._buffers is not None:
            length = self.get_seq_length()
            keys, values = self._buffers = self._buffers[0][indices], self._buffers[1][indices]
            self.keys, self.values = keys[:, :, :length], values[:, :, :length]


def _longer(held: Tensor, new: Tensor, length: int) -> Tensor:
    """A buffer for ``length`` tokens or more, beginning with those of ``held``."""
    batch, heads, _, width = new.shape
    buffer = new.new_empty(batch, heads, -(-length // BLOCK) * BLOCK, width)
    if held.numel():
        buffer[:, :, : held.shape[-2]] = held
    return buffer


class BlockCache(DynamicCache):
    """The cache of a model in decoding. Layers that look at a window or keep a state stay as transformers has them."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        self.layers = [BlockLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences only, of the states of recurrent layers too, which beam search selects as well."""
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.reorder_cache(cast(Any, indices))
            else:
                cast(Any, layer).batch_select_indices(indices)


def cache_argument(model: nn.Module) -> str:
    """What a model's forward calls its cache: state-space models call theirs otherwise."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"

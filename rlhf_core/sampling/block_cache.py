"""A key-value cache that writes new tokens into buffers allocated in advance.

It does not copy itself at each token, and its buffers may stay where they are while a CUDA graph
writes into them.

Shapes: B sequences, K key-value heads, L tokens held so far, D head width.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

# Tokens by which buffers grow: short replies allocate little, and a long one is copied once in so
# many tokens.
BLOCK = 64
# The value of a token that is not written yet, far beyond those of models.
UNSEEN = 1000.0


class BlockLayer(DynamicLayer):
    """Keys and values of one layer, as views (B, K, L, D) of longer buffers.

    Their length is a multiple of :data:`BLOCK`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._slot: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin empty, without copying an empty tensor to the device, as transformers does.

        The host would wait for that.
        """
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, K, new, D); return all.

        A fixed layer writes one token and returns its buffers.
        """
        if self._slot is not None and self._buffers is not None:
            keys, values = self._buffers
            keys.index_copy_(2, self._slot, key_states)
            values.index_copy_(2, self._slot, value_states)
            return keys, values
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        keys, values = self._reserve(end)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys = keys[:, :, :end]
        self.values = values[:, :, :end]
        return self.keys, self.values

    def fix(self, slot: Tensor, length: int) -> None:
        """From now on write at ``slot`` (1,) of buffers of ``length`` tokens.

        What is not written yet is masked. Its values are large, so that a model that sees them all
        the same is found.
        """
        keys, values = self._reserve(length)
        held = self.get_seq_length()
        keys[:, :, held:] = 0.0
        values[:, :, held:] = UNSEEN
        self._slot = slot

    def unfix(self, length: int) -> None:
        """Append again, to the ``length`` tokens that were written."""
        assert self._buffers is not None
        self._slot = None
        keys, values = self._buffers
        self.keys = keys[:, :, :length]
        self.values = values[:, :, :length]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences only."""
        if self._buffers is not None:
            length = self.get_seq_length()
            keys, values = self._buffers
            self._buffers = keys[indices], values[indices]
            self.unfix(length)

    def _reserve(self, length: int) -> tuple[Tensor, Tensor]:
        """Buffers for ``length`` tokens or more, which begin with those held."""
        assert self.keys is not None and self.values is not None
        if self._buffers is None or length > self._buffers[0].shape[-2]:
            held = self.get_seq_length()
            keys = _longer(self.keys, length)
            values = _longer(self.values, length)
            self._buffers = keys, values
            self.unfix(held)  # which lets the shorter ones go
        return self._buffers


def _longer(held: Tensor, length: int) -> Tensor:
    """A buffer for ``length`` tokens or more, beginning with those held (B, K, L, D)."""
    batch, heads, count, width = held.shape
    buffer = held.new_empty(batch, heads, whole_blocks(length), width)
    buffer[:, :, :count] = held
    return buffer


class BlockCache(DynamicCache):
    """The cache of a model in decoding.

    Layers that look at a window or keep a state stay as transformers has them.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        for number, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[number] = BlockLayer()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences only, in recurrent layers' states too.

        Beam search selects these as well.
        """
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.reorder_cache(cast(Any, indices))
            else:
                cast(Any, layer).batch_select_indices(indices)


def whole_blocks(length: int) -> int:
    """``length`` tokens or more, in whole blocks."""
    return -(-length // BLOCK) * BLOCK

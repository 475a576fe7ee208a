"""Bytes of live tensors, counted as operations allocate storages and as storages are freed.

It is what a GPU's allocator would report, without a GPU. Fake tensors are counted by their shapes, so a model of any
size can be measured without its weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one GPU. ``other`` are communication buffers, temporary gradients of embeddings and the rollout."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    logits: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """The sum over all kinds."""
        return sum(getattr(self, kind) for kind in MEMORY_KINDS)

    def __add__(self, more: MemoryUse) -> MemoryUse:
        return MemoryUse(*(getattr(self, kind) + getattr(more, kind) for kind in MEMORY_KINDS))

    def with_gradients(self, gradients: int) -> MemoryUse:
        """The same with ``gradients`` in place of its own."""
        return replace(self, gradients=gradients)


MEMORY_KINDS = tuple(field.name for field in fields(MemoryUse))


def largest(uses: Iterable[MemoryUse]) -> MemoryUse:
    """The use with the highest total; nothing of nothing."""
    return max(uses, key=lambda use: use.total, default=MemoryUse())


class TensorMemory(TorchDispatchMode):
    """Inside ``with TensorMemory(...)`` every storage that an operation returns counts until nothing refers to it.

    ``peak`` is the highest number of bytes since :meth:`restart`. Tensors made before are counted by :meth:`hold`.
    Buffers that a kernel allocates and frees within one operation are not seen.

    Each storage has a kind of :class:`MemoryUse`: results of operations whose last dimension is ``vocabulary`` are
    logits, those whose first dimension it is (gradients of embeddings) are other, all else is activations until
    :meth:`recount` says what it is. A storage counts ``repeat`` times, where one stands for several that are alike.
    """

    def __init__(self, *modules: nn.Module, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.repeat = 1
        self.live = self.peak = 0
        self.peaks: dict[str, int] = {}
        self.segments: list[MemoryUse] = []
        self._bytes = dict.fromkeys(MEMORY_KINDS, 0)
        self._at_peak = dict(self._bytes)
        # By storage: its kind and the bytes that it counts, and what is to be done when it is freed.
        self._counted: dict[int, tuple[str, int]] = {}
        self._finalizers: dict[int, weakref.finalize[Any, Any]] = {}
        for module in modules:
            self.hold([*module.parameters(), *module.buffers()])

    def hold(self, tensors: Iterable[Tensor], kind: str = "weights") -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._count(tensor, kind)

    def recount(self, tensor: Tensor, kind: str | None = None, repeat: int | None = None) -> None:
        """Count the storage of ``tensor`` as ``kind``, ``repeat`` times from here on; None leaves it as it is."""
        storage = tensor.untyped_storage()
        if id(storage) in self._counted:
            old_kind, old_size = self._counted[id(storage)]
            size = old_size if repeat is None else repeat * storage.nbytes()
            self._counted[id(storage)] = kind or old_kind, size
            self._add(old_kind, -old_size)
            self._add(kind or old_kind, size)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak, self._at_peak = self.live, dict(self._bytes)

    def begin_segment(self, repeat: int = 1) -> None:
        """End the current segment, and begin one whose storages count ``repeat`` times.

        The peak of the current one is appended to ``segments``, unless its storages counted several times: their sum
        is right only once it has ended.
        """
        if self.repeat == 1:
            self.segments.append(MemoryUse(**self._at_peak))
        self.repeat = repeat
        self.restart()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block: the highest peak of all blocks of this name stays in ``peaks``."""
        self.restart()
        yield
        self.peaks[name] = max(self.peak, self.peaks.get(name, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._count(leaf, self._kind_by_shape(leaf))
        return result

    def _kind_by_shape(self, tensor: Tensor) -> str:
        if self.vocabulary is None or self.vocabulary not in tensor.shape:
            return "activations"
        return "logits" if tensor.shape[-1] == self.vocabulary else "other"

    def _count(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), self.repeat * storage.nbytes()
        if key not in self._counted and size:
            self._counted[key] = kind, size
            # torch keeps the Python object of a storage for as long as the storage itself lives.
            self._finalizers[key] = weakref.finalize(storage, self._freed, key)
            self._add(kind, size)

    def _freed(self, key: int) -> None:
        kind, size = self._counted.pop(key)
        del self._finalizers[key]
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self._bytes[kind] += size
        self.live += size
        if self.live > self.peak:
            self.peak, self._at_peak = self.live, dict(self._bytes)

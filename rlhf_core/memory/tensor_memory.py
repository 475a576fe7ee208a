"""The bytes of all tensors alive, counted as operations make storages and as storages go: what a GPU's allocator would
report, without a GPU. Works on shapes alone too (fake tensors), so a model of any size can be measured."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Inside ``with TensorMemory(...)`` every storage that an operation returns counts until nothing refers to it.

    ``peak`` is the highest number of bytes since :meth:`restart`. Tensors made before are counted by :meth:`hold`.
    Buffers that a kernel allocates and frees within one operation are not seen.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.peaks: dict[str, int] = {}
        self._known: dict[int, weakref.finalize[Any, Any]] = {}
        for module in modules:
            self.hold([*module.parameters(), *module.buffers()])

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._see(tensor)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block: the highest peak of all blocks of this name stays in ``peaks``."""
        self.restart()
        yield
        self.peaks[name] = max(self.peak, self.peaks.get(name, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._known and size:
            # torch keeps the Python object of a storage for as long as the storage itself lives.
            self._known[key] = weakref.finalize(storage, self._gone, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size

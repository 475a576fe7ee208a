"""A CUDA graph without a GPU: operations are recorded once, and launched again with the very
tensors of then.

What Python decided while it recorded stays decided, as in a real graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# What the host reads of a tensor's values, so that it would wait for a device.
LOOKS = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "item",
    "equal",
    "allclose",
    "masked_select",
    "unique_dim",
}


class Recording(TorchDispatchMode):
    """Runs operations and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in LOOKS or (name == "index" and any(_is_mask(each) for each in args[1])):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(given, torch.Tensor)
            ):
                self.before.append((given, given.clone()))
        result = func(*args, **kwargs)
        self.launches.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        """Launch all again; results go to where they went before."""
        for func, args, kwargs, held in self.launches:
            for old, new in zip(_tensors(held), _tensors(func(*args, **kwargs)), strict=True):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def _tensors(result: Any) -> list[torch.Tensor]:
    return [each for each in _pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


def recorded_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Capture ``work`` as ``cuda_graph`` does; a failure leaves tensors as they were."""
    recording, launched = Recording(), []
    try:
        with recording:
            work()  # stands for the first launch
    except RuntimeError:
        for tensor, values in reversed(recording.before):
            tensor.copy_(values)
        raise

    def launch() -> None:
        if launched:
            recording.replay()
        launched.append(True)

    return launch

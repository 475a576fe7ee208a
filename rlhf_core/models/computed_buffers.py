"""Buffers that no file holds, such as the frequencies of rotary embeddings.

A loaded copy computes them anew.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError


def require_computed_buffers(model: PreTrainedModel, name: str) -> None:
    """Refuse a model whose buffers hold values that a saved copy would not compute.

    ``model.to(torch.bfloat16)`` rounds them, and ``model.float()`` keeps what was rounded;
    ``from_pretrained(dtype=…)`` does neither.

    Args:
        name: What messages call the model.

    Raises:
        ModelError: A buffer is in another precision, or holds other numbers.
    """
    dtype = model.dtype
    buffers: list[tuple[str, nn.Module, str]] = []
    for path, module in model.named_modules():
        buffers += [(path, module, key) for key in _computed(module)]
    if not buffers:
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as the library does while it loads a model of that precision
    try:
        with torch.device("meta"):
            twin = dict(type(model)(copy.deepcopy(model.config)).named_buffers())
    finally:
        torch.set_default_dtype(before)
    for path, module, key in buffers:
        full = f"{path}.{key}".removeprefix(".")
        loaded, own = twin.get(full), module._buffers[key]
        if loaded is None or own is None or own.shape != loaded.shape:
            continue  # of a module that was added or changed on purpose
        expected = _computed_anew(_initialiser(model, path), module, key, loaded.dtype)
        if own.dtype != loaded.dtype or not torch.equal(own.cpu(), expected):
            precision = str(dtype).removeprefix("torch.")
            raise ModelError(
                f"{name}: its buffer {full} was rounded by a change of precision, so that a saved copy would compute "
                f"otherwise; load the model by from_pretrained(…, dtype=torch.{precision}) in place of model.to(…)"
            )


def _computed(module: nn.Module) -> list[str]:
    """Names of a module's buffers of real numbers that are not saved."""
    named = ((key, module._buffers.get(key)) for key in sorted(module._non_persistent_buffers_set))
    return [key for key, buffer in named if buffer is not None and buffer.is_floating_point()]


def _initialiser(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost model that holds the module at ``path``.

    The library initialises modules by it.
    """
    parts = path.split(".")
    holders = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    return next((holder for holder in holders if isinstance(holder, PreTrainedModel)), model)


def _computed_anew(
    model: PreTrainedModel, module: nn.Module, key: str, dtype: torch.dtype
) -> Tensor:
    """Compute a buffer as loading does.

    The library initialises a copy of ``module`` without weights.
    """
    parameters: dict[str, nn.Parameter | None] = {}
    buffers: dict[str, Tensor | None] = {}
    for name, weight in module._parameters.items():
        parameters[name] = None
        if weight is not None:
            empty = torch.empty_like(weight, device="meta")
            parameters[name] = nn.Parameter(empty, requires_grad=False)
    for name, buffer in module._buffers.items():
        buffers[name] = None
        if buffer is not None:
            own_dtype = dtype if name == key else buffer.dtype
            buffers[name] = torch.empty(buffer.shape, dtype=own_dtype, device="cpu").copy_(buffer)
    fresh = copy.copy(module)
    fresh._parameters, fresh._buffers = parameters, buffers
    with torch.no_grad():
        model._init_weights(fresh)
    result = fresh._buffers[key]
    assert result is not None
    return result

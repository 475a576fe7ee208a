"""Frozen models (reference, reward model, referee).

They are on the device, in CPU memory while unused, or sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.shared_base import SharedBase
from rlhf_core.runtime import distributed

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class FrozenModels:
    """The frozen models of a run, placed as ``launch.frozen`` says.

    Attributes:
        waiting: Weights and buffers in host memory of the models that are kept there while nothing
            uses them: the module's dictionary that has each, and its name there. Nothing is ever
            copied back from the device.
        base: Weights that reward model and referee share with the policy, if they do.
    """

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    waiting: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    base: SharedBase | None = None
    _scalars: dict[Path, Any] = field(default_factory=dict)

    @property
    def loading(self) -> torch.device | None:
        """Where a model is loaded that is placed next; None for this process's own device."""
        return torch.device("cpu") if self.launch.frozen == "sharded" else None

    def scalar(self, folder: Path) -> Any:
        """Load and place the reward model or referee in ``folder``.

        Later calls return the same model.

        With a ``base`` it is made of adapters on those weights, and stays on their device.
        """
        key = folder.resolve()
        if key not in self._scalars:
            own = (
                self.base.scalar(folder)
                if self.base is not None
                else ScalarModel.load(folder, device=self.loading)
            )
            own.eval().requires_grad_(False)
            self._scalars[key] = own if self.base is not None else self.place(own)
        return self._scalars[key]

    def place(self, model: Model) -> Model:
        """Place ``model`` as the launch settings say and return it.

        A sharded one is called in the same way.
        """
        if self.launch.frozen == "sharded":
            from rlhf_core.training.engine.deepspeed import ShardedModel

            return cast("Model", ShardedModel.frozen(model, self.launch))
        return self.place_whole(model)

    def place_whole(self, model: Model) -> Model:
        """Place a model without sharding, for models that ranks run independently."""
        if self.launch.frozen == "offload":
            model.to("cpu")
            pin = distributed.device().type == "cuda"
            pinned: dict[Tensor, Tensor] = {}
            for module in model.modules():
                own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for places in own:
                    for name, tensor in places.items():
                        if tensor is None:
                            continue
                        if tensor not in pinned and pin:
                            pinned[tensor] = _like(tensor, _pinned(tensor.detach()))
                        elif tensor not in pinned:
                            pinned[tensor] = tensor
                        places[name] = pinned[tensor]
                        self.waiting.append((places, name, pinned[tensor]))
        return model

    @contextmanager
    def borrowed(self, model: Any) -> Iterator[Any]:
        """Place ``model`` for the block alone.

        A sharded one then lets go of the memory of its shards.
        """
        placed = self.place(model)
        try:
            yield placed
        finally:
            if placed is not model:
                placed.drop()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Copy waiting models to the device for the block."""
        moved: dict[Tensor, Tensor] = {}  # tied weights once
        try:
            for places, name, tensor in self.waiting:
                if tensor not in moved:
                    moved[tensor] = _like(
                        tensor, tensor.detach().to(distributed.device(), non_blocking=True)
                    )
                places[name] = moved[tensor]
            yield
        finally:
            for places, name, tensor in self.waiting:
                places[name] = tensor


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, from where a GPU reads fastest.

    The tensor itself where that is refused.
    """
    try:
        return tensor.pin_memory()
    except RuntimeError:
        return tensor


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """``values`` as a frozen parameter where ``tensor`` is a parameter."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values

"""Frozen models (reference, reward model, referee): on the device, in CPU memory while unused, or sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.models.forward import has_plain_head
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.shared_base import SharedBase
from rlhf_core.runtime import distributed

Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")


@dataclass
class FrozenModels:
    """The frozen models of a run, placed as ``launch.frozen`` says.

    Attributes:
        waiting: Weights and buffers in host memory of the models that are kept there while nothing uses them: the
            module's dictionary that has each, and its name there. Nothing is ever copied back from the device.
        base: Weights that reward model and referee share with the policy, if they do.
    """

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    waiting: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    base: SharedBase | None = None
    _scalars: dict[Path, Any] = field(default_factory=dict)

    def scalar(self, folder: Path) -> Any:
        """Load and place the reward model or referee in ``folder``; later calls return the same model.

        With a ``base`` it is made of adapters on those weights, and stays on their device.
        """
        key = folder.resolve()
        if key not in self._scalars:
            own = self.base.scalar(folder) if self.base is not None else ScalarModel.load(folder).eval()
            own.requires_grad_(False)
            self._scalars[key] = own if self.base is not None else self.place(own)
        return self._scalars[key]

    def place(self, model: Model) -> Model:
        """Place ``model`` as the launch settings say and return it; a sharded one is called in the same way."""
        if self.launch.frozen == "sharded":
            return cast("Model", ShardedModel(model, self.launch))
        return self.place_whole(model)

    def place_whole(self, model: Model) -> Model:
        """Place ``model`` without sharding, for models that ranks run independently of each other."""
        if self.launch.frozen == "offload":
            model.to("cpu")
            pin = distributed.device().type == "cuda"
            pinned: dict[Tensor, Tensor] = {}
            for module in model.modules():
                own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for places, name in ((each, name) for each in own for name in each if each[name] is not None):
                    tensor = places[name]
                    if tensor not in pinned:
                        pinned[tensor] = _like(tensor, _pinned(tensor.detach())) if pin else tensor
                    places[name] = pinned[tensor]
                    self.waiting.append((places, name, pinned[tensor]))
        return model

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Copy waiting models to the device for the block."""
        moved: dict[Tensor, Tensor] = {}  # tied weights once
        try:
            for places, name, tensor in self.waiting:
                if tensor not in moved:
                    moved[tensor] = _like(tensor, tensor.detach().to(distributed.device(), non_blocking=True))
                places[name] = moved[tensor]
            yield
        finally:
            for places, name, tensor in self.waiting:
                places[name] = tensor


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, from where a GPU reads fastest; the tensor itself where that is refused."""
    try:
        return tensor.pin_memory()
    except RuntimeError:
        return tensor


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """``values`` as a frozen parameter where ``tensor`` is a parameter."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


class ShardedModel:
    """A frozen model whose weights are sharded over the ranks and gathered layer by layer.

    All ranks make the same number of passes. Other attributes are those of the model itself.
    """

    def __init__(self, model: nn.Module, launch: LaunchConfig) -> None:
        from rlhf_core.training.engine.deepspeed import Root, frozen_config, load_deepspeed

        self.model = model
        if isinstance(model, PreTrainedModel):
            has_plain_head(model)  # compared while its weights are whole
        config = frozen_config(launch, next(model.parameters()).dtype)
        self.ds, *_ = load_deepspeed().initialize(model=Root(model), config=config)

    def __call__(self, **inputs: Any) -> Any:
        """The model's own forward."""
        return self.run(lambda: self.model(**inputs))

    def run(self, compute: Callable[[], Result]) -> Result:
        """Return ``compute``, which runs parts of the model, whose layers gather their weights meanwhile."""
        result: Result = self.ds(compute)
        return result

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor] | None:
        """The unembedding of a language model as a function, whose weight is gathered in every call."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        return None if head is None else lambda states: self.run(lambda: head(states))

    def reply_scores(self, input_ids: Tensor, attention_mask: Tensor, reply_mask: Tensor | None = None) -> Tensor:
        """The scalar of a scalar model for each row's reply: (B, L) each -> (B,)."""
        model: Any = self.model
        scores: Tensor = self.run(lambda: model.reply_scores(input_ids, attention_mask, reply_mask))
        return scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

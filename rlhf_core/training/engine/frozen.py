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
        waiting: Models that are kept in CPU memory while nothing uses them.
        base: Weights that reward model and referee share with the policy, if they do.
    """

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    waiting: list[nn.Module] = field(default_factory=list)
    base: SharedBase | None = None
    _scalars: dict[Path, Any] = field(default_factory=dict)

    def scalar(self, folder: Path) -> Any:
        """Load and place the reward model or referee in ``folder``; later calls return the same model.

        With a ``base`` it is made of adapters on those weights, and stays on their device.
        """
        key = folder.resolve()
        if key not in self._scalars:
            if self.base is not None:
                self._scalars[key] = self.base.scalar(folder).requires_grad_(False)
            else:
                self._scalars[key] = self.place(ScalarModel.load(folder).eval().requires_grad_(False))
        return self._scalars[key]

    def place(self, model: Model) -> Model:
        """Place ``model`` as the launch settings say and return it; a sharded one is called in the same way."""
        if self.launch.frozen == "sharded":
            return cast("Model", ShardedModel(model, self.launch))
        return self.place_whole(model)

    def place_whole(self, model: Model) -> Model:
        """Place ``model`` without sharding, for models that ranks run independently of each other."""
        if self.launch.frozen == "offload":
            self.waiting.append(model.to("cpu"))
        return model

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Move waiting models to the device for the block."""
        for model in self.waiting:
            model.to(distributed.device())
        try:
            yield
        finally:
            for model in self.waiting:
                model.to("cpu")


class ShardedModel:
    """A frozen model whose weights are sharded over the ranks and gathered layer by layer.

    All ranks make the same number of passes. Other attributes are those of the model itself.
    """

    def __init__(self, model: nn.Module, launch: LaunchConfig) -> None:
        from rlhf_core.training.engine.deepspeed import Root, load_deepspeed
        from rlhf_core.training.engine.zero_config import frozen_config

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

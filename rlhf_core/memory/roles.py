"""The models that a stage keeps, and what each holds on a GPU whether or not it is at work."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlhf_core.config.lora import LoraConfig
from rlhf_core.memory.optimizer import TrainingState, training_state
from rlhf_core.memory.packed import Packed, packed_layers
from rlhf_core.memory.placement import Placement
from rlhf_core.memory.shapes import Shape
from rlhf_core.memory.usage import Use
from rlhf_core.memory.weights import (
    brought_in,
    frozen_weights,
    gathered_by_layers,
    gathered_weights,
    trained_weights,
)


@dataclass(frozen=True)
class Role:
    """One model. ``parameters`` include adapters, and those in 4 bits if any (``packed``); ``state`` is None for a
    frozen one."""

    name: str
    parameters: int
    placement: Placement
    state: TrainingState | None = None
    adapted: bool = False
    packed: Packed | None = None

    @property
    def held(self) -> Use:
        """What it always holds; gradients come and go with the phases."""
        if self.state is None:
            return Use(weights=frozen_weights(self.parameters, self.placement))
        weights = trained_weights(self._plain, self.placement) + (self.packed.size if self.packed else 0)
        lasting = self.state.gradients if self._lasting_gradients else 0
        return Use(weights, lasting, self.state.optimizer, other=self.state.buffers)

    @property
    def whole(self) -> int:
        """Bytes of its weights before anything is packed, sharded or moved away: every model is loaded so."""
        return self.parameters * self.placement.element

    @property
    def loaded(self) -> int:
        """Bytes of its weights when it has been loaded, and packed where it will be, but not sharded yet."""
        return self._plain * self.placement.element + (self.packed.size if self.packed else 0)

    @property
    def _plain(self) -> int:
        """Parameters that are not in 4 bits."""
        return self.parameters - (self.packed.parameters if self.packed else 0)

    @property
    def gradients(self) -> int:
        """Of a whole optimiser step, beyond what is always held."""
        return self.state.gradients if self.state and not self._lasting_gradients else 0

    @property
    def _lasting_gradients(self) -> bool:
        """ZeRO-3 keeps the memory of its gradients from step to step."""
        return self.placement.zero == 3

    @property
    def host(self) -> int:
        """Bytes in host memory for each GPU."""
        if self.state is not None:
            return self.state.host
        return self.whole if self.placement.frozen == "offload" else 0

    def running(self, whole: bool) -> Use:
        """What a trained model needs on top while it runs, ``whole`` or gathered layer by layer."""
        unpacked = self.packed.unpacked(self.placement.element) if self.packed else 0
        return Use(weights=gathered_weights(self._plain, self.placement, whole) + unpacked)

    def at_work(self) -> Use:
        """What a frozen model needs on top while any of them is at work."""
        return Use(weights=brought_in(self.parameters, self.placement))

    def gathering(self) -> Use:
        """What a frozen model needs on top while it runs itself."""
        return Use(weights=gathered_by_layers(self.parameters, self.placement))


def trained(name: str, parameters: int, shape: Shape, placement: Placement, lora: LoraConfig | None = None) -> Role:
    """A model with gradients and optimiser state: of all parameters, or with ``lora`` of adapters and scalar head."""
    if lora is None:
        return Role(name, parameters, placement, training_state(parameters, placement))
    adapters = shape.adapters(lora.rank, lora.targets)
    head = shape.hidden if parameters != shape.causal_lm else 0
    packed = packed_layers(shape) if lora.quantize is not None else None
    return Role(name, parameters + adapters, placement, training_state(adapters + head, placement), True, packed)


def trained_on_shared(name: str, rank: int, targets: Collection[str], shape: Shape, placement: Placement) -> Role:
    """Adapters and a scalar head that are trained on weights which another role holds."""
    own = shape.adapters(rank, targets) + shape.hidden
    return Role(name, own, placement, training_state(own, placement), adapted=True)


def with_trained_head(name: str, parameters: int, shape: Shape, placement: Placement) -> Role:
    """A scalar model of which only the head is trained."""
    return Role(name, parameters, placement, training_state(shape.hidden, placement), adapted=True)


def frozen(name: str, parameters: int, placement: Placement) -> Role:
    """A model that only computes."""
    return Role(name, parameters, placement)

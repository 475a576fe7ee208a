"""The models that a stage keeps, and what each holds on a GPU whether or not it is at work."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.plan.optimizer import TrainingState, training_state
from rlhf_core.plan.placement import Placement
from rlhf_core.plan.usage import Use
from rlhf_core.plan.weights import frozen_in_use, frozen_weights, gathered_weights, trained_weights


@dataclass(frozen=True)
class Role:
    """One model. ``state`` is None for a frozen one; with LoRA its ``adapters`` are the only parameters trained."""

    name: str
    parameters: int
    placement: Placement
    state: TrainingState | None = None
    adapters: int = 0

    @property
    def held(self) -> Use:
        """What it always holds; gradients come and go with the phases."""
        if self.state is None:
            return Use(weights=frozen_weights(self.parameters, self.placement))
        weights = trained_weights(self.parameters, self.placement) + 4 * self.adapters
        return Use(weights=weights, optimizer=self.state.optimizer, other=self.state.buffers)

    @property
    def gradients(self) -> int:
        """Of a whole optimiser step."""
        return self.state.gradients if self.state else 0

    @property
    def host(self) -> int:
        """Bytes in host memory for each GPU."""
        if self.state is not None:
            return self.state.host
        offloaded = self.placement.frozen == "offloaded"
        return self.parameters * self.placement.element if offloaded else 0

    def running(self, whole: bool) -> Use:
        """What it needs on top while it runs: weights that must be gathered or brought in. ``whole``: all at once,
        as for sampling and for passes of a trained model without gradient; else layer by layer."""
        in_use = gathered_weights if self.state else frozen_in_use
        return Use(weights=in_use(self.parameters, self.placement, whole))


def trained(name: str, parameters: int, adapters: int, placement: Placement) -> Role:
    """A model with gradients and optimiser state, of its ``adapters`` alone where it has any."""
    return Role(name, parameters, placement, training_state(adapters or parameters, placement), adapters)


def frozen(name: str, parameters: int, placement: Placement) -> Role:
    """A model that only computes."""
    return Role(name, parameters, placement)

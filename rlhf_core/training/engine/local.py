"""The local engine: plain torch. On several ranks each holds the whole model, and gradients are summed once a step.

A low-precision model computes in its own precision and is trained through float32 copies of its weights:
bfloat16 has 8 significant bits, so that a step of less than 1/512 of a weight rounds to nothing: AdamW at a rate of
5e-7 leaves nearly all weights of a bfloat16 model where they are, however many steps it makes. Steps are therefore made
in float32 and add up there; moments are float32, and so are the sums of gradients over micro-batches. Source:
Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn, optim

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.models.precision import LOW_PRECISION
from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.checkpoint import SavedTensors, pieces_of_rank
from rlhf_core.training.engine.base import (
    OPTIMIZER_SLOTS,
    Engine,
    EngineState,
    OptimizerBuilder,
    StepResult,
    build_adamw,
    trained_parameters,
)


class MasterWeights:
    """Float32 copies of the trainable low-precision parameters of a model; a float32 model has none.

    While it exists, every gradient that a backward pass leaves at such a parameter is added to the copy's gradient and
    freed. :meth:`detach` ends that.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Copy the weights, and make ``optimizer``, which was built for the model's own, update the copies."""
        low = [p for p in model.parameters() if p.requires_grad and p.dtype in LOW_PRECISION]
        self.copies = {parameter: nn.Parameter(parameter.detach().float()) for parameter in low}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._take_gradient) for parameter in low]
        for group in optimizer.param_groups:
            group["params"] = [self.of(parameter) for parameter in group["params"]]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The float32 copy of a parameter of the model, or the parameter itself where it has none."""
        return self.copies.get(parameter, parameter)

    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        master = self.copies[parameter]  # type: ignore[index]
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    @torch.no_grad()
    def round_to_model(self) -> None:
        """Set the model's weights to the copies, rounded to the model's precision."""
        if self.copies:  # one launch on a GPU in place of one for each parameter
            torch._foreach_copy_([*self.copies], [*self.copies.values()])

    def detach(self) -> None:
        """Leave the gradients of later backward passes at the model's own parameters, and forget the copies."""
        for hook in self._hooks:
            hook.remove()
        self.copies = {}


class LocalEngine(Engine):
    """The whole model, its gradients and its optimiser on every rank."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        name: str = "model",
        warmup_steps: int | None = None,
        build: OptimizerBuilder = build_adamw,
    ) -> None:
        """Move the model to the device, and build its optimiser by ``build``."""
        super().__init__(model.to(distributed.device()), config, total_steps, name, warmup_steps)
        self.optimizer = build(model, config)
        self.masters = MasterWeights(model, self.optimizer)
        self.parameters = [self.masters.of(p) for p in model.parameters() if p.requires_grad]
        self.losses: list[Tensor] = []  # of the passes since the last step
        self.skip_reason = ""
        self.nonfinite: Tensor | None = None  # count over ranks of losses that are not finite; None before reduction

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.losses.append(loss.detach())

    def grad_norm(self) -> float:
        gradients = self._gradients()
        losses = torch.stack([loss.double() for loss in self.losses] or [torch.zeros((), dtype=torch.float64)])
        if self.nonfinite is None:
            self.nonfinite = (~losses.isfinite()).sum(dtype=torch.float32)
            distributed.all_reduce_sums([*gradients, self.nonfinite])
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros_like(self.nonfinite)
        # The host waits for the device here, once a step.
        nonfinite, value, *own = torch.stack([self.nonfinite.double(), norm.double(), *losses]).tolist()
        self.skip_reason = next((f"loss {loss}" for loss in own if not math.isfinite(loss)), "")
        return math.nan if nonfinite else float(value)

    def apply(self, grad_norm: float, scale: float) -> StepResult:
        rate, reason = self.rate(), self.skip_reason
        if math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            gradients = self._gradients()
            if scale != 1.0 and gradients:
                torch._foreach_mul_(gradients, scale)
            self.optimizer.step()
            self.masters.round_to_model()
        self._clear()
        return self.counted(grad_norm, rate, reason)

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.losses, self.skip_reason, self.nonfinite = [], "", None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def state(self) -> EngineState:
        tensors = {}
        for name, parameter in trained_parameters(self.model).items():
            updated = self.masters.of(parameter)
            tensors[f"weights.{name}"] = updated.detach()
            for slot, value in self.optimizer.state.get(updated, {}).items():
                if slot in OPTIMIZER_SLOTS:
                    tensors[f"optimizer.{name}.{slot}"] = value.detach()
        return EngineState(pieces_of_rank(tensors), self.counters())

    def load_state(self, tensors: SavedTensors, meta: dict[str, Any]) -> None:
        self._clear()
        parameters, saved = self.parameters_of(tensors), tensors.names
        for name, parameter in parameters.items():
            updated = self.masters.of(parameter)
            with torch.no_grad():
                updated.copy_(tensors.whole(f"weights.{name}"))
            keys = {slot: f"optimizer.{name}.{slot}" for slot in OPTIMIZER_SLOTS}
            moments = {
                slot: tensors.whole(key).to(parameter.device, copy=True) for slot, key in keys.items() if key in saved
            }
            if moments:
                self.optimizer.state[updated] = moments
            else:
                self.optimizer.state.pop(updated, None)
        self.masters.round_to_model()
        self.load_counters(meta)

    def trained_weights(self) -> dict[str, Tensor]:
        if not distributed.is_rank_zero():
            return {}
        return {name: p.detach().cpu().clone() for name, p in trained_parameters(self.model).items()}

    def release(self) -> nn.Module:
        """Return the model itself; gradients, moments and float32 copies are freed."""
        self._clear()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()
        self.masters.detach()
        self.parameters = []
        return self.model

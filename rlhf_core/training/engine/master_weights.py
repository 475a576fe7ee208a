"""Float32 master weights: what the optimiser updates in place of low-precision weights, which are rounded from them.

bfloat16 has 8 significant bits, so that a step of less than 1/512 of a weight rounds to nothing: AdamW at a rate of
5e-7 leaves nearly all weights of a bfloat16 model where they are, however many steps it makes. Steps are therefore made
in float32 and add up there; moments are float32, and so are the sums of gradients over micro-batches. Source:
Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim

from rlhf_core.models.float32_head import LOW_PRECISION


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
        for parameter, master in self.copies.items():
            parameter.copy_(master)

    def detach(self) -> None:
        """Leave the gradients of later backward passes at the model's own parameters."""
        for hook in self._hooks:
            hook.remove()

"""Heads of low-precision models, computed in float32: the unembedding of a language model, the head of a scalar model.

bfloat16 has 8 significant bits, so that a logit of 20 is rounded to a multiple of 1/8, and sampler and trainer, whose
kernels differ in the last digit, disagree about log-probabilities by as much. Hidden states and weights stay as they
are: only their product, the logits, is not rounded (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"; MiniMax 2025, "MiniMax-M1", section 3.2). Float32 models are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Float32Linear(nn.Linear):
    """A linear layer whose product is float32, whatever the precision of its input and its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> float32 (..., out)."""
        bias = self.bias.float() if self.bias is not None else None
        return functional.linear(input.float(), self.weight.float(), bias)

    def repeatable(self) -> Callable[[Tensor], Tensor]:
        """The same function for many calls, with the float32 weights made once.

        Gradients of all calls are then added up in float32, before they are rounded to the weight's precision. A weight
        that exists only during a call, since it is sharded, is converted in every call.
        """
        if not self.weight.numel():
            return self
        weight, bias = self.weight.float(), self.bias.float() if self.bias is not None else None
        return lambda input: functional.linear(input.float(), weight, bias)


def float32_linear(layer: nn.Linear) -> Float32Linear:
    """The layer that computes the same in float32, with the very parameters of ``layer``."""
    made = Float32Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight, made.bias = layer.weight, layer.bias
    made.train(layer.training)
    return made


def use_float32_unembedding(model: PreTrainedModel) -> None:
    """Compute the logits of a low-precision language model in float32 from now on, in every forward pass of it."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.dtype in LOW_PRECISION:
        model.set_output_embeddings(float32_linear(head))


@contextmanager
def float32_unembedding(model: PreTrainedModel) -> Iterator[None]:
    """Compute the logits of a low-precision language model in float32 inside the block; copies made there keep it."""
    head = model.get_output_embeddings()
    use_float32_unembedding(model)
    try:
        yield
    finally:
        if head is not None:
            model.set_output_embeddings(head)

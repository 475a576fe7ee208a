"""The precision in which a model multiplies.

It is that of its weights, or TF32 for float32 weights on a GPU that may use it.

The heads of low-precision models (unembedding, head of a scalar model) are computed in float32:

bfloat16 has 8 significant bits, so that a logit of 20 is rounded to a multiple of 1/8, and sampler
and trainer, whose kernels differ in the last digit, disagree about log-probabilities by as much.
Hidden states and weights stay as they are: only their product, the logits, is not rounded (Yao et
al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; MiniMax 2025,
"MiniMax-M1", section 3.2). Float32 models are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rlhf_core.runtime import distributed

logger = logging.getLogger(__name__)

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Float32Linear(nn.Linear):
    """A linear layer whose product is float32 whatever the precision of its input and weight."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> float32 (..., out)."""
        bias = self.bias.float() if self.bias is not None else None
        return functional.linear(input.float(), self.weight.float(), bias)

    def repeatable(self) -> Callable[[Tensor], Tensor]:
        """The same function for many calls, with the float32 weights made once.

        Gradients of all calls are then added up in float32, before they are rounded to the weight's
        precision. A weight that exists only during a call, since it is sharded, is converted in
        every call.
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
    """Compute a low-precision language model's logits in float32 from now on."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.dtype in LOW_PRECISION:
        model.set_output_embeddings(float32_linear(head))


@contextmanager
def float32_unembedding(model: PreTrainedModel) -> Iterator[None]:
    """Compute the logits of a low-precision language model in float32 inside the block.

    Copies made there keep it.
    """
    head = model.get_output_embeddings()
    use_float32_unembedding(model)
    try:
        yield
    finally:
        if head is not None:
            model.set_output_embeddings(head)


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Compute in the models' own precision and with gradients inside the block.

    PyTorch's modes that are active around it are switched off.

    ``torch.autocast`` keeps the casts of the first step's weights, so later steps and measurements
    would read stale ones; below ``torch.no_grad`` and ``torch.inference_mode`` nothing could be
    trained. New tensors would be of the default precision, and on the default device.
    """
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        # Entered only where it changes something: it slows down every operation.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for device in ("cpu", distributed.device().type):
            if torch.is_autocast_enabled(device):
                logger.warning(
                    "torch.autocast is switched off inside: base.dtype or model.to() choose the precision"
                )
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


Precision = Literal["float64", "float32", "tf32", "bfloat16"]


def allow_tf32(allowed: bool) -> None:
    """Let float32 matrix products of this process's GPU use TF32, or forbid it.

    A CPU is left as it is.

    TF32 rounds the factors to 11 significant bits (float32 has 24) and adds up in float32.
    """
    if distributed.device().type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed


def weights_precision(
    dtype: Literal["float32", "bfloat16", "auto"],
) -> Literal["float32", "bfloat16"]:
    """Return ``base.dtype`` with ``auto`` resolved.

    That is bfloat16 where this process's device has instructions for its products.

    A processor without them emulates bfloat16 at a fraction of float32's speed.
    """
    if dtype != "auto":
        return dtype
    if distributed.device().type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return "bfloat16" if native else "float32"


def matmul_precision(model: nn.Module) -> Precision:
    """The precision of the products inside ``model``.

    Its first weight tells, which is never an adapter's.

    float16 counts as bfloat16 here, the coarser of the two.
    """
    weight = next(model.parameters())
    if weight.dtype in LOW_PRECISION:
        return "bfloat16"
    if weight.dtype == torch.float64:
        return "float64"
    tf32 = weight.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "float32"

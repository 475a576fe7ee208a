"""Attention of one new token in bfloat16 or float16 on a CPU, where several query heads share keys and values.

PyTorch's kernel treats each query head by itself there, and takes up to eight times as long as with the queries that
share a head passed as so many positions, which is the same sum. In float32, and where a mask is passed, it is as fast
either way or transformers does so itself (Ainslie et al., 2023, "GQA: Training Generalized Multi-Query Transformer
Models from Multi-Head Checkpoints").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_core.models.float32_head import LOW_PRECISION

CPU_NAME, GPU_NAME = "rlhf_grouped_sdpa", "rlhf_sdpa"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """(B, H, 1, D) queries, (B, K, L, D) keys and values -> (B, 1, H, D); anything else as transformers computes it."""
    batch, heads, positions, width = query.shape
    special = attention_mask is not None or any(settings.get(name) is not None for name in ("position_bias", "cache"))
    if positions > 1 or special or heads == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    grouped = query.reshape(batch, key.shape[1], -1, width)
    attended = nn.functional.scaled_dot_product_attention(grouped, key, value, scale=settings.get("scaling"))
    return attended.reshape(batch, 1, heads, width), None


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Iterator[None]:
    """Decode inside the block with grouped attention on a CPU, and on a GPU with masks that nothing waits for."""
    name = GPU_NAME if model.device.type != "cpu" else CPU_NAME if model.dtype in LOW_PRECISION else None
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    changed = [each for each in configs.values() if name and getattr(each, "_attn_implementation", None) == "sdpa"]
    if changed:
        AttentionInterface.register(CPU_NAME, grouped_attention)
        AttentionMaskInterface.register(CPU_NAME, sdpa_mask)
        AttentionInterface.register(GPU_NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(GPU_NAME, mask_without_look)
    try:
        for config in changed:
            # The empty name stands for the configuration itself, without those of its parts.
            config._attn_implementation = {"": name}
        yield
    finally:
        for config in changed:
            config._attn_implementation = {"": "sdpa"}


def mask_without_look(*args: Any, **settings: Any) -> Tensor | None:
    """transformers' mask, made whether or not a row is padded: to find out, the host would wait at every token."""
    if settings.get("attention_mask") is not None:
        settings["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **settings)

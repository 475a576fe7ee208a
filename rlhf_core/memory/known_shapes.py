"""Published sizes of models that profiles name, so that planning needs no hub. Each is its config.json in short."""

from __future__ import annotations

from rlhf_core.memory.shapes import Shape


def _llama(hidden: int, intermediate: int, layers: int, heads: int, positions: int) -> Shape:
    return Shape(32000, hidden, intermediate, layers, heads, heads, hidden // heads, False, positions)


def _smol(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, positions: int) -> Shape:
    return Shape(49152, hidden, intermediate, layers, heads, kv_heads, 64, True, positions)


# LLaMA: Touvron et al. 2023, table 2 (feed-forward 2/3 of 4H, rounded up to a multiple of 256). Llama 2 has the same
# sizes with twice the positions. SmolLM2: the config.json of its model cards.
KNOWN = {
    "huggyllama/llama-7b": _llama(4096, 11008, 32, 32, 2048),
    "huggyllama/llama-13b": _llama(5120, 13824, 40, 40, 2048),
    "meta-llama/Llama-2-7b-hf": _llama(4096, 11008, 32, 32, 4096),
    "meta-llama/Llama-2-13b-hf": _llama(5120, 13824, 40, 40, 4096),
    "HuggingFaceTB/SmolLM2-135M": _smol(576, 1536, 30, 9, 3, 8192),
    "HuggingFaceTB/SmolLM2-360M": _smol(960, 2560, 32, 15, 5, 8192),
    "HuggingFaceTB/SmolLM2-1.7B": _smol(2048, 8192, 24, 32, 32, 8192),
}

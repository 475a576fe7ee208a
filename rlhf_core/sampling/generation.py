"""Sampling replies with a key-value cache of our own loop, so that the sampler's log-probabilities are known exactly.

Shapes: B sequences, P prompt width (left-padded), T response width (right-padded), V vocabulary.

A key-value cache that writes new tokens into buffers allocated in advance, instead of copying itself at each token.

Shapes: B sequences, K key-value heads, L tokens held so far, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from rlhf_core.data.encoding import left_pad
from rlhf_core.models.forward import arguments_of, position_ids_from_mask
from rlhf_core.sampling.distribution import TokenDistribution, inverse_cdf

# Tokens by which buffers grow: short replies allocate little, and a long one is copied once in so many tokens.
BLOCK = 64


class BlockLayer(DynamicLayer):
    """Keys and values of one layer, views (B, K, L, D) of buffers whose length is a multiple of :data:`BLOCK`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin empty, as transformers does, but without a copy of nothing to the device, which the host waits for."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, K, new, D); return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            assert self.keys is not None and self.values is not None
            self._buffers = _longer(self.keys, key_states, end), _longer(self.values, value_states, end)
        keys, values = self._buffers
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences only."""
        if self._buffers is not None:
            length = self.get_seq_length()
            keys, values = self._buffers = self._buffers[0][indices], self._buffers[1][indices]
            self.keys, self.values = keys[:, :, :length], values[:, :, :length]


def _longer(held: Tensor, new: Tensor, length: int) -> Tensor:
    """A buffer for ``length`` tokens or more, beginning with those of ``held``."""
    batch, heads, _, width = new.shape
    buffer = new.new_empty(batch, heads, -(-length // BLOCK) * BLOCK, width)
    if held.numel():
        buffer[:, :, : held.shape[-2]] = held
    return buffer


class BlockCache(DynamicCache):
    """The cache of a model in decoding. Layers that look at a window or keep a state stay as transformers has them."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        self.layers = [BlockLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences only, of the states of recurrent layers too, which beam search selects as well."""
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.reorder_cache(cast(Any, indices))
            else:
                cast(Any, layer).batch_select_indices(indices)


def cache_argument(model: nn.Module) -> str:
    """What a model's forward calls its cache: state-space models call theirs otherwise."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"


OnTokens = Callable[[Tensor], None]
COMPACT_BELOW = 0.75
# Steps between looks at which replies have ended. Looking waits for a GPU to finish what was queued; on a CPU looking
# is free, while a step too many is not. What is computed for ended replies is never kept.
LOOK_EVERY = {"cpu": 1, "cuda": 16}


@dataclass(frozen=True)
class Rollout:
    """Sampled replies. ``logprobs`` are the sampler's own; the end marker is part of the response."""

    tokens: Tensor  # (B, P+T) long
    attention_mask: Tensor  # (B, P+T) long, 1 on real tokens
    response_mask: Tensor  # (B, T) bool
    logprobs: Tensor  # (B, T) float, 0 at masked positions
    finished: Tensor  # (B,) bool: the reply ends with its end marker

    @property
    def lengths(self) -> Tensor:
        """Response tokens of each sequence (B,)."""
        return self.response_mask.sum(dim=1)

    def replies(self) -> list[list[int]]:
        """Token ids of each reply, its end marker included."""
        width = self.response_mask.shape[1]
        rows = self.tokens[:, self.tokens.shape[1] - width :].tolist()
        return [row[:length] for row, length in zip(rows, self.lengths.tolist(), strict=True)]


@dataclass
class _Active:
    """The rows still being written: their numbers in the batch, cache, last logits and tokens so far.

    Attributes:
        cache_name: What the model's forward calls its cache.
        needs_mask: Whether the model has to see ``mask``. On a GPU rows without padding need none: attention is
            faster without.
    """

    rows: Tensor
    cache: Any
    tokens: Tensor
    mask: Tensor
    logits: Tensor
    cache_name: str
    needs_mask: bool

    def forward(self, model: PreTrainedModel, ids: Tensor, position_ids: Tensor) -> None:
        given = {
            "attention_mask": self.mask if self.needs_mask else None,
            "position_ids": position_ids,
            self.cache_name: self.cache,
            "logits_to_keep": 1,
        }
        self.logits = model(**arguments_of(model, use_cache=True, input_ids=ids, **given)).logits[:, -1]

    def append(self, picked: Tensor) -> None:
        """Add the sampled tokens (b,)."""
        self.tokens = torch.cat([self.tokens, picked.unsqueeze(1)], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(picked), 1)], dim=1)

    def keep(self, kept: Tensor) -> None:
        """Drop finished rows, in the cache too."""
        self.rows, self.tokens, self.mask = self.rows[kept], self.tokens[kept], self.mask[kept]
        self.cache.batch_select_indices(kept)


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    uniforms: Tensor,
    sampling: TokenDistribution,
    on_tokens: OnTokens | None = None,
    width: int = 0,
) -> Rollout:
    """Sample one reply per prompt, of which there may be none.

    Args:
        model: The model, in evaluation mode.
        prompt_ids: Token ids of each prompt.
        uniforms: (B, max_new_tokens) float64, which decide every draw; see ``philox_uniforms``.
        sampling: The training distribution, or the filtered one, whose log-probabilities are of no use to PPO.
        on_tokens: Called after each step with the new token of every reply that was still being written.
        width: Columns of prompts, at least.
    """
    base = sampling.base
    prompts, prompt_mask = left_pad(prompt_ids, base.pad_id, width)
    prompts, prompt_mask = prompts.to(model.device), prompt_mask.to(model.device)
    count, steps = len(prompt_ids), base.max_new_tokens
    response = prompts.new_full((count, steps), base.pad_id)
    # Loading a model sets the default type of the whole process meanwhile.
    logprobs = torch.zeros(count, steps, dtype=torch.float32, device=model.device)
    lengths = torch.full((count,), steps, device=model.device)
    finished = torch.zeros(count, dtype=torch.bool, device=model.device)
    if count == 0:
        return trimmed_rollout(prompts, prompt_mask, response, logprobs, lengths, finished)
    uniforms = uniforms.to(model.device)
    stop_ids = prompts.new_tensor(base.stop_ids)
    look_every = 1 if on_tokens is not None else LOOK_EVERY.get(model.device.type, 1)
    padded = any(len(prompt) < prompts.shape[1] for prompt in prompt_ids)
    active = _Active(
        rows=torch.arange(count, device=model.device),
        cache=BlockCache(model.config),
        tokens=prompts,
        mask=prompt_mask,
        logits=prompts.new_empty(0),
        cache_name=cache_argument(model),
        needs_mask=padded or model.device.type == "cpu",
    )
    active.forward(model, prompts, position_ids_from_mask(prompt_mask))
    for t in range(steps):
        log_probabilities = sampling.next_token(active.logits, active.tokens[:, prompts.shape[1] :])
        picked = inverse_cdf(log_probabilities, uniforms[active.rows, t])
        rows, writing = active.rows, ~finished[active.rows]
        response[rows, t] = picked.where(writing, response[rows, t])
        sampled = log_probabilities.gather(1, picked.unsqueeze(1)).squeeze(1).float()
        logprobs[rows, t] = sampled.where(writing, 0.0)
        if on_tokens is not None:
            on_tokens(picked[writing])
        ended = writing & torch.isin(picked, stop_ids)
        finished[rows] |= ended
        lengths[rows] = lengths[rows].masked_fill(ended, t + 1)
        if t + 1 == steps:
            break
        active.append(picked)
        if (t + 1) % look_every == 0:
            kept = (~finished[rows]).nonzero().squeeze(1)
            if not len(kept):
                break
            if len(kept) <= COMPACT_BELOW * len(rows):
                active.keep(kept)
        active.forward(model, active.tokens[:, -1:], active.mask.sum(dim=1, keepdim=True) - 1)
    return trimmed_rollout(prompts, prompt_mask, response, logprobs, lengths, finished)


def trimmed_rollout(
    prompts: Tensor, prompt_mask: Tensor, response: Tensor, logprobs: Tensor, lengths: Tensor, finished: Tensor
) -> Rollout:
    """Cut the response to its longest reply and build the masks from lengths alone (so pad may equal eos)."""
    width = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(width, device=lengths.device).unsqueeze(0) < lengths.unsqueeze(1)
    return Rollout(
        tokens=torch.cat([prompts, response[:, :width]], dim=1),
        attention_mask=torch.cat([prompt_mask, mask.long()], dim=1),
        response_mask=mask,
        logprobs=logprobs[:, :width],
        finished=finished,
    )

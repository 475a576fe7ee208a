"""Sampling replies with a loop and a key-value cache of our own.

The sampler's log-probabilities are known exactly that way.

Shapes: B sequences, P prompt width (left-padded), T response width (right-padded), V vocabulary.

On a GPU a decoding step is captured once as a CUDA graph and launched as a whole from then on: one
by one its hundreds of kernels take longer to launch than to run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rlhf_core.data.tokens import left_pad
from rlhf_core.models.architecture import arguments_of, cache_argument
from rlhf_core.models.forward import position_ids_from_mask
from rlhf_core.models.precision import LOW_PRECISION
from rlhf_core.runtime.progress import within_step
from rlhf_core.sampling.block_cache import BlockCache, BlockLayer, whole_blocks
from rlhf_core.sampling.distribution import NOT_DRAWN, TokenDistribution, inverse_cdf
from rlhf_core.sampling.token_scoring import Tokens

OnTokens = Callable[[Tensor], None]
COMPACT_BELOW = 0.75
# Steps between looks at which replies have ended. Looking waits for a GPU to finish what was
# queued; on a CPU looking is free, while a step too many is not. What is computed for ended replies
# is never kept.
LOOK_EVERY = {"cpu": 1, "cuda": 16}


_capturing = threading.Lock()


def cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Capture what ``work`` launches, without running it; the result runs it."""
    graph = torch.cuda.CUDAGraph()
    # A capture that fails does not leave its stream. Other threads may copy or sample meanwhile,
    # but not capture.
    with (
        _capturing,
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        work()
    return partial(_replay, graph, work)


def _replay(graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
    """Launch a graph.

    ``work`` holds the tensors that it reads, whose memory would otherwise be reused.
    """
    graph.replay()


WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NoWaiting(TorchDispatchMode):
    """Raises ``RuntimeError`` where the host waits for a device, or copies to it.

    No graph can do that.

    A capture would fail there, after which PyTorch goes on taking memory as if it still captured.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = _tensors_in((args, kwargs))
        if func is torch.ops.aten.index.Tensor:
            looks = any(each.dtype == torch.bool for each in given[1:])
        elif func is torch.ops.aten.is_nonzero.default:
            looks = True
        else:
            looks = not WAITING.isdisjoint(func.tags)
        devices = {each.device for each in given}  # those of single numbers too
        of_arrays = {each.device for each in given if each.dim()}
        made_on = {each.device for each in _tensors_in(result)}
        moved = bool(given) and not made_on <= devices
        if looks or moved or len(of_arrays) > 1:
            raise RuntimeError(f"the host waits in {func}")
        return result


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# How a device captures work that is to be launched again and again. That takes as long as two or
# three steps without it (H100, 28 layers), so it is left out for the last few, and half of the rows
# must have ended before others are dropped.
GRAPHS: dict[str, Callable[[Callable[[], None]], Callable[[], None]]] = {"cuda": cuda_graph}
GRAPH_STEPS = 8
GRAPH_COMPACT_BELOW = 0.5
GRAPH_LENGTH = 128  # tokens by which buffers of a graph grow: attention reads them all, and a capture takes 15 ms
_WORKS = "_rlhf_decodes_as_graph"  # attribute of a model that was compared; copies keep it


@dataclass(frozen=True)
class Rollout:
    """Sampled replies.

    ``logprobs`` are the sampler's own; the end marker is part of the response.
    """

    tokens: Tensor  # (B, P+T) long
    attention_mask: Tensor  # (B, P+T) long, 1 on real tokens
    response_mask: Tensor  # (B, T) bool
    logprobs: Tensor  # (B, T) float, 0 at masked positions
    finished: Tensor  # (B,) bool: the reply ends with its end marker

    @property
    def batch(self) -> Tokens:
        """What models see of it."""
        return Tokens(self.tokens, self.attention_mask, self.response_mask)

    def replies(self) -> list[list[int]]:
        """Token ids of each reply, its end marker included."""
        return self.batch.replies()


@dataclass
class _Rows:
    """Replies in the making, one per row (b), and what decides their next tokens.

    Attributes:
        numbers: Numbers of the rows in the batch (b,).
        uniforms: (b, T) float64.
        drawn: Tokens (b, T), and :data:`NOT_DRAWN` after those drawn so far.
        logprobs: (b, T) of these.
        lengths: Tokens of each reply (b,).
        finished: Whether it has ended (b,).
        positions: Of the token that the model sees next (b, 1).
        mask: (b, P+T) long: of it the model sees the columns held.
    """

    numbers: Tensor
    uniforms: Tensor
    drawn: Tensor
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor
    positions: Tensor
    mask: Tensor

    def kept(self, kept: Tensor) -> _Rows:
        """Some of the rows."""
        columns = {name: own[kept] for name, own in vars(self).items()}
        return _Rows(**columns)

    def take(self, rows: _Rows) -> None:
        """Take over what was drawn for some of these rows."""
        if rows is self:
            return
        for name in ("drawn", "logprobs", "lengths", "finished"):
            own = getattr(self, name)
            own[rows.numbers] = getattr(rows, name)


class _Decoding:
    """A generation under way, on the device of the model.

    It has its rows, its cache and the tokens drawn last.

    Args:
        needs_mask: Whether the model has to see the mask. On a GPU rows without padding need none:
            attention is faster without.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: TokenDistribution,
        rows: _Rows,
        width: int,
        needs_mask: bool,
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.rows = rows
        self.needs_mask = needs_mask
        self.cache = BlockCache(model.config)
        self.cache_name = cache_argument(model)
        self.stop_ids = rows.drawn.new_tensor(sampling.base.stop_ids)
        self.held = width
        self.step = rows.drawn.new_zeros(1)
        self.picked = rows.drawn.new_zeros(len(rows.drawn))
        self._has_room = True  # in memory, for a graph
        self._replay: Callable[[], None] | None = None
        self._fixed_length = 0

    def read(self, ids: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Logits (b, V) of the token that follows ``ids`` (b, L)."""
        arguments = arguments_of(
            self.model,
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        logits: Tensor = self.model(**arguments).logits
        return logits[:, -1]

    def draw(self, logits: Tensor) -> None:
        """Draw the token of each row at ``step``."""
        rows = self.rows
        step = self.step
        log_probabilities = self.sampling.next_token(logits, rows.drawn, step)
        uniforms = rows.uniforms.index_select(1, step).squeeze(1)
        picked = inverse_cdf(log_probabilities, uniforms)
        column = picked.unsqueeze(1)
        sampled = log_probabilities.gather(1, column).float()
        writing = ~rows.finished
        sampled = sampled.where(writing.unsqueeze(1), 0.0)
        rows.drawn.index_copy_(1, step, column)
        rows.logprobs.index_copy_(1, step, sampled)
        rows.lengths += writing
        rows.finished |= torch.isin(picked, self.stop_ids)
        self.picked.copy_(picked)

    def advance(self, steps_left: int) -> None:
        """Pass the drawn tokens through the model, and draw the next ones."""
        if self.held == self._fixed_length:
            self.release()
        if self._replay is None and steps_left >= GRAPH_STEPS and self._may_be_captured:
            length = self.held + min(steps_left, GRAPH_LENGTH)
            self._capture(whole_blocks(length))
        if self._replay is not None:
            self._replay()
        else:
            self.step += 1
            self.rows.positions += 1
            self.draw(self._read_drawn(self.rows.positions))
        self.held += 1

    def _read_drawn(self, positions: Tensor) -> Tensor:
        mask = None
        if self.needs_mask:
            mask = self.rows.mask[:, : self.held + 1]
        return self.read(self.picked.unsqueeze(1), positions, mask)

    def release(self) -> None:
        """Go on without the graph."""
        if self._replay is not None:
            self._replay = None
            self._unfix()

    def keep(self, kept: Tensor) -> None:
        """Drop the other rows, in the cache too."""
        self.release()
        self.rows = self.rows.kept(kept)
        self.picked = self.picked[kept]
        self.cache.batch_select_indices(kept)

    def compact_below(self, steps_left: int) -> float:
        """The share of rows still being written at which the others are dropped."""
        if self._replay is None:
            return COMPACT_BELOW
        return GRAPH_COMPACT_BELOW if steps_left >= GRAPH_STEPS else 0.0

    @property
    def _may_be_captured(self) -> bool:
        device = self.model.device
        works = getattr(self.model, _WORKS, True)
        if device.type not in GRAPHS or not self._has_room or not works:
            return False
        # Only what is launched on the current device is captured.
        if device.index is not None and device.index != torch.cuda.current_device():
            return False
        layers = self.cache.layers
        return all(type(layer) is BlockLayer and layer.is_initialized for layer in layers)

    def _capture(self, length: int) -> None:
        """Capture steps of a cache of ``length`` tokens.

        A model that cannot be captured is marked so.
        """
        try:
            if not hasattr(self.model, _WORKS):
                setattr(self.model, _WORKS, self._reads_the_same(length))
            if not getattr(self.model, _WORKS):
                return
            slot, seen = self._fix(length)

            def advance() -> None:
                self.step.add_(1)
                self.rows.positions.add_(1)
                self.draw(self._read_fixed(self.rows.positions, slot, seen))

            capture = GRAPHS[self.model.device.type]
            self._replay = capture(advance)
            self._fixed_length = length
        except RuntimeError as error:
            if _is_for_want_of_memory(error):
                self._has_room = False  # other replies may have it
            else:
                setattr(self.model, _WORKS, False)
            self._unfix()

    def _reads_the_same(self, length: int) -> bool:
        """Whether the model gives the same logits when it reads tokens as a graph does."""
        positions = self.rows.positions + 1
        plain = self._read_drawn(positions)
        self._unfix()
        slot, seen = self._fix(length)
        try:
            with NoWaiting():  # type: ignore[no-untyped-call]
                fixed = self._read_fixed(positions, slot, seen)
        # For want of memory, or since the host waits: the caller tells them apart.
        except RuntimeError:
            raise
        except Exception:  # whatever an architecture does with a mask that others take
            return False
        finally:
            self._unfix()
        near = 0.05 if seen.dtype in LOW_PRECISION else 1e-3
        difference = (fixed - plain).abs().max()
        return bool(difference <= near * plain.abs().max())

    def _read_fixed(self, positions: Tensor, slot: Tensor, seen: Tensor) -> Tensor:
        """Read the drawn tokens into the slot (1,) that follows.

        The mask (b, 1, 1, L) shows it from then on.
        """
        slot.add_(1)
        seen.index_fill_(3, slot, 0.0)
        return self.read(self.picked.unsqueeze(1), positions, seen)

    def _fix(self, length: int) -> tuple[Tensor, Tensor]:
        """Fix the cache.

        Returns the slot (1,) of its last token, and the mask (b, 1, 1, L) of all.
        """
        slot = self.step.new_full((1,), self.held - 1)
        for layer in self.cache.layers:
            cast(BlockLayer, layer).fix(slot, length)
        # Added to scores of attention: nothing at tokens held, and almost -inf elsewhere.
        dtype = self.model.dtype
        lowest = torch.finfo(dtype).min
        mask = self.rows.mask[:, None, None, : self.held].bool()
        seen = slot.new_full((len(mask), 1, 1, length), lowest, dtype=dtype)
        held = seen[..., : self.held]
        held.masked_fill_(mask, 0.0)
        return slot, seen

    def _unfix(self) -> None:
        for layer in self.cache.layers:
            cast(BlockLayer, layer).unfix(self.held)


def _is_for_want_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out.

    PyTorch has an error for it; CUDA may also lack memory while it makes a graph of what was
    captured.

    A capture that ended by that may fail once more where it is left.
    """
    if error is None:
        return False
    return "out of memory" in str(error) or _is_for_want_of_memory(error.__context__)


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
        sampling: The training distribution, or the filtered one, whose log-probabilities are of no
            use to PPO.
        on_tokens: Called after each step with the new token of every reply that was still being
            written.
        width: Columns of prompts, at least.
    """
    base = sampling.base
    device = model.device
    prompts, prompt_mask = left_pad(prompt_ids, base.pad_id, width)
    prompts = prompts.to(device)
    prompt_mask = prompt_mask.to(device)
    count = len(prompt_ids)
    steps = base.max_new_tokens
    whole = _Rows(
        numbers=torch.arange(count, device=device),
        uniforms=uniforms.to(device),
        drawn=prompts.new_full((count, steps), NOT_DRAWN),
        # A thread that loads a model changes the default type of the whole process meanwhile.
        logprobs=torch.zeros(count, steps, dtype=torch.float32, device=device),
        lengths=prompts.new_zeros(count),
        finished=torch.zeros(count, dtype=torch.bool, device=device),
        positions=prompt_mask.sum(dim=1, keepdim=True) - 1,
        mask=torch.cat([prompt_mask, prompt_mask.new_ones(count, steps)], dim=1),
    )
    if count:
        padded = any(len(prompt) < prompts.shape[1] for prompt in prompt_ids)
        needs_mask = padded or device.type == "cpu"
        _write(model, prompts, sampling, whole, needs_mask, on_tokens)
    columns = torch.arange(steps, device=device)
    is_padding = columns >= whole.lengths.unsqueeze(1)
    response = whole.drawn.masked_fill(is_padding, base.pad_id)
    return trimmed_rollout(
        prompts, prompt_mask, response, whole.logprobs, whole.lengths, whole.finished
    )


def _write(
    model: PreTrainedModel,
    prompts: Tensor,
    sampling: TokenDistribution,
    whole: _Rows,
    needs_mask: bool,
    on_tokens: OnTokens | None,
) -> None:
    """Draw the replies of ``whole`` to prompts (B, P), token by token."""
    width = prompts.shape[1]
    steps = sampling.base.max_new_tokens
    prompt_mask = whole.mask[:, :width]
    decoding = _Decoding(model, sampling, whole, width, needs_mask)
    if on_tokens is not None:
        look_every = 1
    else:
        look_every = LOOK_EVERY.get(model.device.type, 1)
    try:
        positions = position_ids_from_mask(prompt_mask)
        seen = prompt_mask if needs_mask else None
        logits = decoding.read(prompts, positions, seen)
        decoding.draw(logits)
        for step in range(1, steps + 1):
            within_step("sampling, token", step, steps)
            if on_tokens is not None:
                on_tokens(decoding.picked[decoding.rows.lengths == step])
            if step == steps:
                break
            if step % look_every == 0:
                rows = decoding.rows
                kept = (~rows.finished).nonzero().squeeze(1)
                if not len(kept):
                    break
                most_kept = decoding.compact_below(steps - step) * len(rows.numbers)
                if len(kept) <= most_kept:
                    whole.take(rows)
                    decoding.keep(kept)
            decoding.advance(steps - step)
    finally:
        decoding.release()  # a graph and its tensors hold each other
    whole.take(decoding.rows)


def trimmed_rollout(
    prompts: Tensor,
    prompt_mask: Tensor,
    response: Tensor,
    logprobs: Tensor,
    lengths: Tensor,
    finished: Tensor,
) -> Rollout:
    """Cut the response to its longest reply, and build the masks from lengths alone.

    So the padding token may be the end marker.
    """
    width = 0
    if len(lengths):
        width = int(lengths.max())
    columns = torch.arange(width, device=lengths.device)
    mask = columns.unsqueeze(0) < lengths.unsqueeze(1)
    return Rollout(
        tokens=torch.cat([prompts, response[:, :width]], dim=1),
        attention_mask=torch.cat([prompt_mask, mask.long()], dim=1),
        response_mask=mask,
        logprobs=logprobs[:, :width],
        finished=finished,
    )

"""Samplers: their interface, the sampler of the trainer's own process, and sampling over ranks.

Sampling over data-parallel ranks: each rank samples its share of the prompts, and gets all replies.

Shapes: B sequences, P prompt width (left-padded), T response width (right-padded).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.errors import RlhfError
from rlhf_core.runtime import distributed
from rlhf_core.sampling.decoding import decoding_layers
from rlhf_core.sampling.distribution import Sampling, TokenDistribution, philox_uniforms
from rlhf_core.sampling.generation import Rollout, generate


@dataclass(frozen=True)
class PromptBatch:
    """Prompts to sample one reply each.

    Attributes:
        ids: Token ids of each prompt.
        streams: Number of each reply's random stream. With ``seed`` it alone decides the reply's draws, whatever rank
            or batch the prompt falls into.
        seed: Seed of all streams.
        width: Columns that prompts are padded to where none of them is longer. Another width rounds logits otherwise:
            parts of a batch that have that of the whole get the very replies that the whole would.
    """

    ids: Sequence[Sequence[int]]
    streams: Sequence[int]
    seed: int
    width: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class Sampler(Protocol):
    """Samples replies with a copy of the policy's weights: ``sync``, then ``sample`` inside of ``awake``."""

    @property
    def version(self) -> int | None:
        """That of the weights from the last :meth:`sync`; None before the first."""

    def sync(self, policy: PreTrainedModel, version: int) -> None:
        """Take over the weights of ``policy``, whole on every rank, and call them ``version``. All ranks call it.

        Raises:
            RlhfError: It is called inside of :meth:`awake`, where weights must not change.
        """

    def awake(self, version: int, rows: int, steps: int) -> AbstractContextManager[None]:
        """Be ready to sample inside the block; outside of it a sampler may give its memory back.

        Args:
            version: The weights to sample with, those of the last :meth:`sync`.
            rows: Prompts that one call of :meth:`sample` gets, at most.
            steps: Tokens per reply of all these calls together, at most.

        Raises:
            RlhfError: The sampler has other weights, or none.
        """

    def sample(self, prompts: PromptBatch, sampling: TokenDistribution) -> Rollout:
        """Sample one reply per prompt (of which there may be none), for the calling rank alone.

        Raises:
            RlhfError: It is called outside of :meth:`awake`.
        """


def require_version(held: int | None, version: int) -> None:
    """Refuse to sample with other weights than those of ``version``.

    Raises:
        RlhfError: The sampler holds the weights of another version, or none.
    """
    if held is None:
        raise RlhfError(f"the sampler has no weights yet, version {version} was asked for: call sync first")
    if held != version:
        raise RlhfError(f"the sampler has the weights of version {held}, not of {version}: call sync first")


class LocalSampler:
    """Samples with the model of the last :meth:`sync`; no weight is copied but those of decoding layers."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._policy: PreTrainedModel | None = None
        self._awake = False

    @classmethod
    def of(cls, policy: PreTrainedModel) -> LocalSampler:
        """A sampler of a model that does not change, whose only version is 0."""
        sampler = cls()
        sampler.sync(policy, 0)
        return sampler

    def sync(self, policy: PreTrainedModel, version: int) -> None:
        """Sample with ``policy`` from now on; see :meth:`Sampler.sync`."""
        if self._awake:
            raise RlhfError("the weights of a sampler that is awake must not change: call sync before awake")
        self._policy, self.version = policy, version

    @contextmanager
    def awake(self, version: int, rows: int, steps: int) -> Iterator[None]:
        """Put decoding layers into the model for the block; see :meth:`Sampler.awake`."""
        require_version(self.version, version)
        assert self._policy is not None
        with decoding_layers(self._policy, rows, steps):
            self._awake = True
            try:
                yield
            finally:
                self._awake = False

    def sample(self, prompts: PromptBatch, sampling: TokenDistribution) -> Rollout:
        """Sample all ``prompts`` together; see :meth:`Sampler.sample`."""
        if not self._awake:
            raise RlhfError("a sampler samples only while it is awake: call sample inside of awake")
        assert self._policy is not None
        uniforms = philox_uniforms(prompts.seed, prompts.streams, sampling.base.max_new_tokens)
        return generate(self._policy, prompts.ids, uniforms, sampling, width=prompts.width)


def sample_replies(
    sampler: Sampler, version: int, prompts: PromptBatch, sampling: Sampling, batch_size: int | None = None
) -> Rollout:
    """Sample one reply per prompt, at most ``batch_size`` prompts of a rank at a time (all of them for ``None``).

    Args:
        sampler: Has the weights of ``version``.
        version: The weights to sample with.
        prompts: Those of all ranks.
        sampling: The training distribution.
        batch_size: Bounds the memory of one call of the sampler.

    Returns:
        The replies to all prompts, on every rank. Those of a bit-exact sampler have the bits of one process and batch,
        as far as a row's products do not depend on the number of rows.
    """
    width = max(map(len, prompts.ids), default=0)
    ids, streams = distributed.shard_for_rank(prompts.ids), distributed.shard_for_rank(prompts.streams)
    together = batch_size or max(len(ids), 1)
    starts = range(0, max(len(ids), 1), together)
    parts = []
    with sampler.awake(version, min(together, len(ids)), len(starts) * sampling.max_new_tokens):
        for start in starts:
            rows = slice(start, start + together)
            parts.append(sampler.sample(PromptBatch(ids[rows], streams[rows], prompts.seed, width), sampling))
    rollout = gather_rollout(concatenate(parts, sampling.pad_id), len(prompts), sampling.pad_id)
    # Inference tensors cannot take part in autograd later, so plain copies go on.
    return Rollout(**{field.name: getattr(rollout, field.name).clone() for field in fields(Rollout)})


def concatenate(parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Join rollouts of several batches, whose prompts are equally wide: responses are padded to the widest."""
    if len(parts) == 1:
        return parts[0]
    widest = max(part.response_mask.shape[1] for part in parts)

    def widened(part: Rollout, values: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(values, (0, widest - part.response_mask.shape[1]), value=fill)

    return Rollout(
        tokens=torch.cat([widened(part, part.tokens, pad_id) for part in parts]),
        attention_mask=torch.cat([widened(part, part.attention_mask, 0) for part in parts]),
        response_mask=torch.cat([widened(part, part.response_mask, 0) for part in parts]),
        logprobs=torch.cat([widened(part, part.logprobs, 0) for part in parts]),
        finished=torch.cat([part.finished for part in parts]),
    )


def gather_rollout(own: Rollout, total: int, pad_id: int) -> Rollout:
    """Join the rollouts of all ranks, whose prompts are equally wide, to one of ``total`` rows."""
    return Rollout(
        tokens=distributed.gather_rows(own.tokens, total, pad_id),
        attention_mask=distributed.gather_rows(own.attention_mask, total),
        response_mask=distributed.gather_rows(own.response_mask, total),
        logprobs=distributed.gather_rows(own.logprobs, total),
        finished=distributed.gather_rows(own.finished, total),
    )

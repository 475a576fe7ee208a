"""Samplers: their interface, the sampler of the trainer's own process, and sampling over ranks.

Sampling over data-parallel ranks: each rank samples its share of the prompts, and gets all replies.

Shapes: B sequences, P prompt width (left-padded), T response width (right-padded).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.sampler import SamplerConfig
from rlhf_core.errors import RlhfError
from rlhf_core.plugins import SAMPLERS, made_by_plugin
from rlhf_core.runtime import distributed
from rlhf_core.sampling.decoding import decoding_layers
from rlhf_core.sampling.distribution import Sampling, TokenDistribution, philox_uniforms
from rlhf_core.sampling.generation import Rollout, generate


@dataclass(frozen=True)
class PromptBatch:
    """Prompts to sample one reply each.

    Attributes:
        ids: Token ids of each prompt.
        streams: Number of each reply's random stream. With ``seed`` it alone decides the reply's
            draws, whatever rank or batch the prompt falls into.
        seed: Seed of all streams.
        width: Columns that prompts are padded to where none of them is longer. Rounding depends on
            it: parts of a batch that are padded like the whole get the same replies as the whole.
    """

    ids: Sequence[Sequence[int]]
    streams: Sequence[int]
    seed: int
    width: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class Sampler(ABC):
    """Samples replies with a copy of the policy's weights.

    Call ``sync`` first, then ``sample`` inside of ``awake``.

    ``version`` is that of the weights from the last :meth:`sync`; None before the first.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._awake = False

    def sync(self, policy: PreTrainedModel, version: int) -> None:
        """Take over the weights of ``policy`` and call them ``version``. All ranks call it.

        They are whole on every rank, or sharded (``training.engine.deepspeed.ShardedModel``) where
        a server samples.

        Raises:
            RlhfError: It is called inside of :meth:`awake`, where weights must not change.
        """
        if self._awake:
            raise RlhfError(
                "the weights of a sampler that is awake must not change: call sync before awake"
            )
        self._take_over(policy, version)
        self.version = version

    @contextmanager
    def awake(self, version: int | None, rows: int, steps: int) -> Iterator[None]:
        """Be ready to sample inside the block; outside of it a sampler may give its memory back.

        Args:
            version: The weights to sample with, those of the last :meth:`sync`.
            rows: Prompts that one call of :meth:`sample` gets, at most.
            steps: Tokens per reply of all these calls together, at most.

        Raises:
            RlhfError: The sampler has other weights, or none.
        """
        if self.version is None:
            raise RlhfError(
                f"the sampler has no weights yet, version {version} was asked for: call sync first"
            )
        if self.version != version:
            raise RlhfError(
                f"the sampler has the weights of version {self.version}, not of {version}: call sync first"
            )
        with self._ready(rows, steps):
            self._awake = True
            try:
                yield
            finally:
                self._awake = False

    def release(self) -> None:
        """Let go of the model of the last :meth:`sync`.

        Another one needs its memory before the next.
        """
        self.version = None

    def sample(self, prompts: PromptBatch, sampling: TokenDistribution) -> Rollout:
        """Sample one reply per prompt (of which there may be none), for the calling rank alone.

        Raises:
            RlhfError: It is called outside of :meth:`awake`, or the sampler knows no such
                distribution.
        """
        if not self._awake:
            raise RlhfError("a sampler samples only while it is awake: call sample inside of awake")
        return self._draw(prompts, sampling)

    def close(self) -> None:  # noqa: B027 - most have started nothing
        """End what it started; nothing is asked of it afterwards."""

    @abstractmethod
    def _take_over(self, policy: PreTrainedModel, version: int) -> None: ...

    @abstractmethod
    def _ready(self, rows: int, steps: int) -> AbstractContextManager[None]: ...

    @abstractmethod
    def _draw(self, prompts: PromptBatch, sampling: TokenDistribution) -> Rollout: ...


class LocalSampler(Sampler):
    """Samples with the model of the last :meth:`sync`.

    No weight is copied but those of decoding layers.
    """

    _policy: PreTrainedModel

    @classmethod
    def of(cls, policy: PreTrainedModel) -> LocalSampler:
        """A sampler of a model that does not change, whose only version is 0."""
        sampler = cls()
        sampler.sync(policy, 0)
        return sampler

    def release(self) -> None:
        super().release()
        del self._policy

    def _take_over(self, policy: PreTrainedModel, version: int) -> None:
        self._policy = policy

    def _ready(self, rows: int, steps: int) -> AbstractContextManager[None]:
        return decoding_layers(self._policy, rows, steps)

    def _draw(self, prompts: PromptBatch, sampling: TokenDistribution) -> Rollout:
        length = sampling.base.max_new_tokens
        uniforms = philox_uniforms(prompts.seed, prompts.streams, length)
        return generate(self._policy, prompts.ids, uniforms, sampling, width=prompts.width)


@contextmanager
def opened_sampler(config: SamplerConfig, work: Path, folder: Path) -> Iterator[Sampler]:
    """Yield the sampler that ``config`` names, and end what it started after the block.

    Args:
        config: Its relative paths start at ``folder``, the workspace.
        work: The folder of the run's partial state.
    """
    sampler: Sampler = LocalSampler()
    if config.kind != "local":
        place = work / "sampler"
        sampler = made_by_plugin(SAMPLERS, config.kind, config.make_sampler, place, folder)
    with closing(sampler):
        yield sampler


def sample_replies(
    sampler: Sampler,
    version: int,
    prompts: PromptBatch,
    sampling: Sampling,
    batch_size: int | None = None,
) -> Rollout:
    """Sample one reply per prompt, at most ``batch_size`` of a rank at a time.

    None takes all of them at once.

    Args:
        sampler: Has the weights of ``version``.
        version: The weights to sample with.
        prompts: Those of all ranks.
        sampling: The training distribution.
        batch_size: Bounds the memory of one call of the sampler.

    Returns:
        The replies to all prompts, on every rank. Those of a bit-exact sampler have the bits of one
        process and batch, as far as a row's products do not depend on the number of rows.
    """
    width = max(map(len, prompts.ids), default=0)
    ids = distributed.shard_for_rank(prompts.ids)
    streams = distributed.shard_for_rank(prompts.streams)
    count = len(ids)
    least_one = max(count, 1)
    together = batch_size or least_one
    starts = range(0, least_one, together)
    parts = []
    steps = len(starts) * sampling.max_new_tokens
    with sampler.awake(version, min(together, count), steps):
        for start in starts:
            rows = slice(start, start + together)
            batch = PromptBatch(ids[rows], streams[rows], prompts.seed, width)
            parts.append(sampler.sample(batch, sampling))
    columns: dict[str, Tensor] = {}
    own_replies = concatenate(parts, sampling.pad_id)
    for name, own in vars(own_replies).items():
        fill = sampling.pad_id if name == "tokens" else 0
        whole = distributed.gather_rows(own, len(prompts), fill)
        # Inference tensors cannot take part in autograd later, so plain copies go on.
        columns[name] = whole.clone()
    return Rollout(**columns)


def concatenate(parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Join rollouts of several batches, whose prompts are equally wide.

    Responses are padded to the widest.
    """
    if len(parts) == 1:
        return parts[0]
    widest = max(part.response_mask.shape[1] for part in parts)
    joined = {}
    for name in vars(parts[0]):
        fill = pad_id if name == "tokens" else 0
        columns = []
        for part in parts:
            column = getattr(part, name)
            if column.dim() > 1:
                missing = widest - part.response_mask.shape[1]
                column = torch.nn.functional.pad(column, (0, missing), value=fill)
            columns.append(column)
        joined[name] = torch.cat(columns)
    return Rollout(**joined)

"""The interface of samplers: who generates the replies, in this process or in a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from rlhf_core.errors import RlhfError
from rlhf_core.sampling.distribution import TokenDistribution
from rlhf_core.sampling.generation import Rollout


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

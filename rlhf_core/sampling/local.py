"""Sampling in the trainer's own process, with its own model. Bit-exact: a reply is a function of weights and stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from rlhf_core.errors import RlhfError
from rlhf_core.sampling.decoding.decoding_layers import decoding_layers
from rlhf_core.sampling.distribution import TokenDistribution, philox_uniforms
from rlhf_core.sampling.generation import Rollout, generate
from rlhf_core.sampling.sampler import PromptBatch, require_version


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

"""The choice of a sampler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rlhf_core.config.ppo import SamplerConfig
from rlhf_core.sampling.sampler import LocalSampler, Sampler


@contextmanager
def opened_sampler(config: SamplerConfig, work: Path) -> Iterator[Sampler]:
    """Yield the sampler that ``config`` names, and end what it started after the block.

    Args:
        config: ``ppo.sampler``.
        work: Folder of the run's partial state.
    """
    if config.kind == "local":
        yield LocalSampler()
        return
    from rlhf_core.sampling.vllm import VllmSampler

    with closing(VllmSampler(config, work / "sampler")) as sampler:
        yield sampler

"""Who samples the replies: the trainer itself, or what a package gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.model import OfKind
from rlhf_core.plugins import SAMPLERS


class SamplerConfig(OfKind):
    """Who samples replies; a package enters a subclass of it in ``rlhf.samplers``."""

    group = SAMPLERS
    makes = "make_sampler"

    @classmethod
    def own_kinds(cls) -> tuple[type[OfKind], ...]:
        return (LocalSamplerConfig,)

    def make_sampler(self, work: Path, workspace: Path) -> Any:
        """Return a ``rlhf_core.sampling.sampler.Sampler``, which a package defines.

        Imports of torch and the like belong in here: settings are read where nothing is trained.

        Args:
            work: A folder for what it writes.
            workspace: The folder that relative paths start at.
        """
        raise NotImplementedError

    def problem(self, workspace: Path) -> str:
        """Say which setting cannot work on this machine, as far as files tell; empty: none."""
        return ""


class LocalSamplerConfig(SamplerConfig):
    """The trainer's own process with the trainer's own weights. Bit-exact."""

    kind: Literal["local"] = "local"

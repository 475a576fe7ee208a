"""The sampler ``vllm`` as settings name it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_extras.sampling.server_settings import VllmServerSettings

if TYPE_CHECKING:
    from rlhf_extras.sampling.vllm import VllmSampler


class VllmSamplerConfig(VllmServerSettings):
    """A vLLM server, which gets the policy's weights before every rollout. Not bit-exact."""

    def problem(self, workspace: Path) -> str:
        """Say so where ``python`` is no program."""
        python = self.seen_from(workspace).python
        if python is None or shutil.which(python) is not None:
            return ""
        return f"python: {python} is no program; name the Python of an environment that has vLLM"

    def make_sampler(self, work: Path, workspace: Path) -> VllmSampler:
        """Return the sampler; its server starts when it gets weights."""
        from rlhf_extras.sampling.vllm import VllmSampler

        return VllmSampler(self.seen_from(workspace), work)

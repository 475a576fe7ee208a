"""Who samples the replies of PPO's rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rlhf_core.config.evaluation.endpoint import check_endpoint
from rlhf_core.config.model import Strict


class LocalSamplerConfig(Strict):
    """The trainer's own process with the trainer's own weights. Bit-exact."""

    kind: Literal["local"] = "local"


class VllmSamplerConfig(Strict):
    """A vLLM server, which gets the policy's weights before every rollout. Not bit-exact.

    ``python`` is that of an environment with vLLM, from which the server is started, with ``arguments`` added to its
    command line; ``start_seconds`` bounds the start. Or ``url`` names a running server, ``token_env`` the environment
    variable with its bearer token, and ``weights_folder`` a folder that trainer and server see under the same path.

    ``timeout_seconds`` bounds a request, ``concurrent_requests`` those that a rank has open at once. With ``sleep`` the
    server gives its memory back while PPO updates; it must support that (not on CPUs).
    """

    kind: Literal["vllm"]
    python: str | None = None
    arguments: tuple[str, ...] = Field(default=(), strict=False)
    start_seconds: PositiveFloat = 900.0
    url: str | None = None
    token_env: str | None = None
    weights_folder: str | None = None
    timeout_seconds: PositiveFloat = 600.0
    concurrent_requests: PositiveInt = 256
    sleep: bool = False

    @model_validator(mode="after")
    def _one_server(self) -> VllmSamplerConfig:
        if (self.python is None) == (self.url is None):
            raise ValueError("name either python, to start vLLM's server from, or the url of a running one")
        if self.url is None:
            if self.token_env is not None:
                raise ValueError("token_env is for the server at url; one that is started gets a random token")
            return self
        check_endpoint(self.url, self.token_env)
        if self.weights_folder is None:
            raise ValueError("url needs weights_folder, a folder that the server sees under the same path")
        if self.arguments:
            raise ValueError("arguments are for a server that is started from python; start the one at url with them")
        return self


SamplerConfig = Annotated[LocalSamplerConfig | VllmSamplerConfig, Field(discriminator="kind")]

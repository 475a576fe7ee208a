"""What the server of the sampler ``vllm`` needs to be told, read without vLLM or torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rlhf_core.config.model import check_endpoint
from rlhf_core.config.sampler import SamplerConfig


class VllmServerSettings(SamplerConfig):
    """How a vLLM server is started or reached, and how it gets the weights.

    Attributes:
        python: Python of an environment with vLLM, from which the server is started: a command, or
            a path that is relative to the workspace.
        arguments: Added to its command line.
        start_seconds: Bounds the start.
        url: Or the address of a running server.
        token_env: Environment variable with its bearer token.
        weights: How the server gets the weights: as `files`, or by `nccl`, from GPU to GPU, where
            it runs at `url`.
        weights_folder: Folder of the files that trainer and running server see under the same path.
        timeout_seconds: Bounds a request, by nccl a whole transfer.
        concurrent_requests: Requests that a rank has open at once.
        sleep: The server gives its memory back while PPO updates; it must support that (not on
            CPUs).
    """

    kind: Literal["vllm"]
    python: str | None = None
    arguments: tuple[str, ...] = Field(default=(), strict=False)
    start_seconds: PositiveFloat = 900.0
    url: str | None = None
    token_env: str | None = None
    weights: Literal["files", "nccl"] = "files"
    weights_folder: str | None = None
    timeout_seconds: PositiveFloat = 600.0
    concurrent_requests: PositiveInt = 256
    sleep: bool = False

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if (self.python is None) == (self.url is None):
            raise ValueError(
                "name either python, to start vLLM's server from, or the url of a running one"
            )
        if self.url is None:
            if self.token_env is not None:
                raise ValueError(
                    "token_env is for the server at url; one that is started gets a random token"
                )
            if self.weights == "nccl":
                raise ValueError(
                    "nccl connects GPUs of a server at url: one that is started has the trainer's own"
                )
            return self
        check_endpoint(self.url, self.token_env)
        if self.weights == "files" and self.weights_folder is None:
            raise ValueError(
                "url needs weights_folder, a folder that the server sees under the same path, or weights nccl"
            )
        if self.weights == "nccl" and self.weights_folder is not None:
            raise ValueError("weights nccl writes no files: set weights_folder to null")
        if self.sleep and self.weights == "nccl":
            raise ValueError(
                "sleep gives memory back to a trainer on the same GPUs, and by nccl the server has others"
            )
        if self.arguments:
            raise ValueError(
                "arguments are for a server that is started from python; start the one at url with them"
            )
        return self

    def seen_from(self, folder: Path) -> Self:
        """Return these settings with relative paths, which start at ``folder``, made absolute."""
        paths = {}
        if self.weights_folder is not None:
            paths["weights_folder"] = self.weights_folder
        if self.python is not None and "/" in self.python:  # a bare command stays
            paths["python"] = self.python
        absolute = {}
        for name, path in paths.items():
            absolute[name] = os.path.abspath(folder / os.path.expanduser(path))
        return self.model_copy(update=absolute)

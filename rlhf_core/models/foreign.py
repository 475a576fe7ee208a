"""A model of somebody else's is opened in a child process first: it may never end, or fill the memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_core import hub
from rlhf_core.errors import ModelError, first_line
from rlhf_core.models.io import SHARD, empty_model, hub_files, is_local, require_own_files
from rlhf_core.models.starting.gguf import gguf_config, is_gguf, load_gguf_tokenizer
from rlhf_core.runtime.limited_call import CallLimits, limit_reached

LIMITS = CallLimits()
SAMPLE = "What is that? It is this.\n"
MOST_PER_BYTE = 16  # weights in a byte of a file; quantised to one bit there are eight


def require_openable(source: str | Path, revision: str | None = None, auto_class: Any = None) -> None:
    """Try in a child process whether a model can be opened under :data:`LIMITS`, without its weights.

    A folder, a GGUF file or a hub id of somebody else's may hold a tokenizer that never ends, and sizes that fill the
    memory. What is wrong otherwise is left to whoever loads the model; chat templates are always run under limits.

    Args:
        auto_class: Which class will load it; by default ``AutoModelForCausalLM``.

    Raises:
        ModelError: A limit was reached, or the files name what lies outside of the folder.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if is_local(source) or is_gguf(path):
            return
        found = hub_files(str(source), revision)
        if found is None:
            return
        path = found
    if path.is_dir():
        require_own_files(path)
    parts: dict[str, Callable[[], None]] = {
        "its tokenizer": lambda: _encode_sample(path),
        "the model of its configuration": lambda: _build_modules(path, auto_class),
    }
    for what, part in parts.items():
        if reached := limit_reached(part, LIMITS):
            raise ModelError(
                f"{source}: opening {what} {reached}; it is damaged, or made to do harm: take another model"
            )


def _encode_sample(path: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if path.is_file():
        tokenizer = load_gguf_tokenizer(path)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    tokenizer.encode(SAMPLE)


def _build_modules(path: Path, auto_class: Any) -> None:
    """Build the model on shapes alone; raise ``MemoryError`` where loading would make weights that no file holds."""
    torch.set_num_threads(1)
    config = gguf_config(path) if path.is_file() else AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    model = empty_model(auto_class or AutoModelForCausalLM, config)
    weights = [path] if path.is_file() else list(path.glob(f"*{SHARD}"))
    held = sum(file.stat().st_size for file in weights)
    claimed = sum(parameter.numel() for parameter in model.parameters())
    if weights and claimed > max(MOST_PER_BYTE * held, LIMITS.memory):
        raise MemoryError


FROM_CACHE = "set HF_HUB_OFFLINE=1 to use a copy in the cache, or name a folder"
TOO_MANY_REQUESTS, SERVER_ERRORS = 429, 500


def find_hub_model(source: str, revision: str | None = None) -> str:
    """Look a hub id up, and return where it is: nothing is downloaded.

    Raises:
        ModelError: It is neither in the cache nor on the hub, may not be read, or has no safetensors weights there.
    """
    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError as error:
        raise ModelError(f"{source} is neither a folder here nor a hub id such as owner/name; correct it") from error
    if isinstance(cached, str):
        return "in the cache"
    if is_offline_mode():
        raise ModelError(
            f"{source} is no folder here and not in the cache, and HF_HUB_OFFLINE=1 forbids asking the hub; unset it, "
            "or name a folder"
        )
    hub.require_hub(source, ModelError)
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        about = api.model_info(source, revision=revision, timeout=hub.TIMEOUT)
        if about.gated:  # everybody may read about such a model, but not its files
            api.auth_check(source)
    except Exception as error:  # of several libraries
        raise ModelError(_refusal(source, revision, error)) from error
    names = {file.rfilename for file in about.siblings or ()}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{source} has no config.json or no .safetensors weights on the hub; give another model")
    return "on the hub"


def _refusal(source: str, revision: str | None, error: Exception) -> str:
    """Why the hub does not give a model, and what to do."""
    if isinstance(error, GatedRepoError):
        return (
            f"{source} is gated: accept its terms on {constants.ENDPOINT}/{source}, and set HF_TOKEN to a token of "
            "the account that did"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{source} has no revision {revision!r} on the hub; correct base.revision"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return (
            f"{source} is neither a folder here nor on the hub {constants.ENDPOINT}; is it spelt right? A private "
            "one needs a token in HF_TOKEN"
        )
    if status in (401, 403):
        return f"the hub {constants.ENDPOINT} refuses {source} ({status}); set HF_TOKEN to a token that may read it"
    if status is not None and (status == TOO_MANY_REQUESTS or status >= SERVER_ERRORS):
        return f"{source} cannot be loaded: the hub {constants.ENDPOINT} answers {status}; try later, or {FROM_CACHE}"
    return (
        f"{source} cannot be looked up: {constants.ENDPOINT} does not answer as a hub does "
        f"({type(error).__name__}: {first_line(error)}); check HF_ENDPOINT, or {FROM_CACHE}"
    )

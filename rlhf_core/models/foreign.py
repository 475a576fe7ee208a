"""A model of somebody else's is opened in a child process first: it may never end, or fill the memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_core.data.chat.chat_template import reply_format
from rlhf_core.errors import ModelError
from rlhf_core.models.attention import attention_of
from rlhf_core.models.io import hub_files, is_local
from rlhf_core.models.own_files import require_own_files
from rlhf_core.models.starting.gguf import gguf_config, is_gguf, load_gguf_tokenizer
from rlhf_core.runtime.limited_call import CallLimits, limit_reached

LIMITS = CallLimits()
SAMPLE = "What is that? It is this.\n"


def require_openable(source: str | Path, revision: str | None = None, auto_class: Any = None) -> None:
    """Try in a child process whether a model can be opened under :data:`LIMITS`, without its weights.

    A folder, a GGUF file or a hub id of somebody else's may hold a chat template or a tokenizer that never ends, and
    sizes that fill the memory. What is wrong otherwise is left to whoever loads the model.

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
        "its tokenizer and chat template": lambda: _write_dialogues(path),
        "the model of its configuration": lambda: _build_modules(path, auto_class),
    }
    for what, part in parts.items():
        if reached := limit_reached(part, LIMITS):
            raise ModelError(
                f"{source}: opening {what} {reached}; it is damaged, or made to do harm: take another model"
            )


def _write_dialogues(path: Path) -> None:
    """Make the tokenizer, and let its template write dialogues."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if path.is_file():
        tokenizer = load_gguf_tokenizer(path)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    tokenizer.encode(SAMPLE)
    if tokenizer.chat_template:
        reply_format(tokenizer)


def _build_modules(path: Path, auto_class: Any) -> None:
    """Build the model on shapes alone."""
    torch.set_num_threads(1)
    config = gguf_config(path) if path.is_file() else AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    kind = auto_class or AutoModelForCausalLM
    with torch.device("meta"):
        kind.from_config(config, attn_implementation=attention_of(kind, config))

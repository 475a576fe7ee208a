"""GGUF files (llama.cpp's format) as starting models: dequantised into a plain transformers model."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_core import distributed
from rlhf_core.errors import ModelError
from rlhf_core.models.float32_head import use_float32_unembedding
from rlhf_core.models.forward import embedding_weight
from rlhf_core.models.io import quiet

SUFFIX = ".gguf"
MAGIC = b"GGUF"


def is_gguf(source: str | Path) -> bool:
    """Whether ``source`` names a GGUF file rather than a folder or a hub id."""
    return Path(source).suffix.lower() == SUFFIX


def load_gguf(file: Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in evaluation mode, and its tokenizer, from one GGUF file.

    The weights are those that the quantised ones stand for: training moves them on, and what is saved is a plain
    safetensors folder that keeps nothing of the quantisation.

    Args:
        dtype: Precision of the weights; None is float32.

    Raises:
        ModelError: The file is missing, truncated or of an architecture that transformers cannot read, or the package
            ``gguf`` is not installed.
    """
    folder, precision = str(file.parent), dtype or torch.float32
    causal_lm: Any = AutoModelForCausalLM
    with _reading(file):
        tokenizer = _tokenizer(file)
        quantised, info = causal_lm.from_pretrained(
            folder, gguf_file=file.name, dtype=precision, trust_remote_code=False, output_loading_info=True
        )
        if info["missing_keys"]:
            raise ValueError(f"it lacks {len(info['missing_keys'])} weights, such as {sorted(info['missing_keys'])[0]}")
        # transformers refuses to save a model that it loaded from quantised weights.
        config = copy.deepcopy(quantised.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model: Any = causal_lm.from_config(config, dtype=precision, attn_implementation="sdpa")
        model.load_state_dict(quantised.state_dict())
        use_float32_unembedding(model)
        tokenizer = _without_entries_beyond(tokenizer, embedding_weight(model).shape[0])
    return model.to(distributed.device()).eval(), tokenizer


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file without its weights; ``ModelError`` as for :func:`load_gguf`."""
    with _reading(file):
        return _tokenizer(file)


def _tokenizer(file: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name, padding_side="left", trust_remote_code=False
    )
    return tokenizer


def _without_entries_beyond(tokenizer: PreTrainedTokenizerBase, entries: int) -> PreTrainedTokenizerBase:
    """``tokenizer`` without the tokens for which the model has no embedding.

    transformers adds ``<|endoftext|>`` where a file has no unknown token; as text it would be an id out of range.
    """
    if len(tokenizer) <= entries:
        return tokenizer
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < entries]
    kept = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str) and tokenizer.get_vocab()[token] < entries
    }
    reduced = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(document)), padding_side="left", **kept
    )
    reduced.chat_template = tokenizer.chat_template
    return reduced


def check_gguf(file: Path) -> bool:
    """Read the header of a GGUF file, and that all tensors it names are within the file.

    Returns:
        Whether it has a chat template.

    Raises:
        ModelError: As for :func:`load_gguf`, for what can be told without loading the weights.
    """
    gguf_config(file)
    with _reading(file):
        from gguf import GGUFReader

        header = GGUFReader(file)
        names = {tensor.name for tensor in header.tensors}
        if "tokenizer.ggml.tokens" not in header.fields or "token_embd.weight" not in names:
            raise ValueError("it has no tokenizer or no embedding")
        return "tokenizer.chat_template" in header.fields


def gguf_config(file: Path) -> PretrainedConfig:
    """The architecture of a GGUF file, from its header; ``ModelError`` as for :func:`load_gguf`."""
    with _reading(file):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(file.parent), gguf_file=file.name, trust_remote_code=False
        )
    return config


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Check the file, silence libraries, and turn their errors into ``ModelError``."""
    if not file.is_file():
        raise ModelError(f"no GGUF file at {file}")
    if find_spec("gguf") is None:
        raise ModelError(f"{file} needs the package gguf: install rlhf-pipeline[gguf]")
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{file} is not a GGUF file (its first bytes are not {MAGIC.decode()})")
    try:
        # Its progress bar obeys no setting of transformers.
        with quiet(), redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # numpy's, gguf's and transformers' own, of a file that is damaged or of another kind
        first_line = str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
        remedy = (
            "give a file of an architecture that transformers reads from GGUF"
            if "architecture" in first_line
            else "it may be cut off or damaged: fetch it again, or give a file that transformers reads"
        )
        raise ModelError(f"cannot load {file}: {first_line}; {remedy}") from error

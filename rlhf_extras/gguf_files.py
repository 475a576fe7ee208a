"""GGUF files (llama.cpp's format) as starting models: dequantised into a plain transformers model.

The header is read without the weights: keys, tensors, and whether the file is as long as they say.
Source: the specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

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
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_core.data.text import shortened
from rlhf_core.errors import ModelError, first_line, is_exhausted
from rlhf_core.models.architecture import embedding_weight
from rlhf_core.models.io import attention_of, quiet, require_finite_weights, require_room_for
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.runtime import distributed

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURE = "general.architecture"
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
# Types of values: bytes of the fixed ones by their number in the file, then the two of variable
# length.
FIXED_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
FETCH_AGAIN = "fetch the file again"
# What no model has, and what would fill the memory or compute for hours: ggml's tensors have four
# dimensions, and the longest texts are chat templates.
MOST_DIMENSIONS = 4
LONGEST_TEXT = 16 << 20  # bytes


@dataclass(frozen=True)
class GgufHeader:
    """What the header of a GGUF file says.

    Attributes:
        values: The keys with their values where those are strings or integers, the lengths of
            arrays, None for others.
        shapes: Of the tensors by name, fastest dimension first.
    """

    values: Mapping[str, str | int | None]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def architecture(self) -> str:
        """The name of the architecture; empty where the file has none."""
        return str(self.values.get(ARCHITECTURE) or "")


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header of ``file``, and check that every tensor that it names lies within the file.

    Raises:
        ModelError: It is not a GGUF file, of another version or byte order, or cut off.
    """
    length = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ModelError(
                f"{file} is not a GGUF file (its first bytes are not {MAGIC.decode()}); {FETCH_AGAIN}"
            )
        try:
            values, tensors, start = _Header(opened, length, file).read()
        except (struct.error, EOFError) as error:
            raise ModelError(
                f"{file} is cut off: it ends within its header, after {length} bytes; {FETCH_AGAIN}"
            ) from error
    for name, (_, end) in tensors.items():
        if start + end > length:
            raise ModelError(
                f"{file} is cut off: the tensor {name} ends at byte {start + end}, the file has {length}; {FETCH_AGAIN}"
            )
    return GgufHeader(values, {name: shape for name, (shape, _) in tensors.items()})


@dataclass
class _Header:
    """Reads on from the magic number.

    ``struct.error`` or ``EOFError`` where the file ends too early.
    """

    opened: BinaryIO
    length: int
    file: Path

    def read(
        self,
    ) -> tuple[dict[str, str | int | None], dict[str, tuple[tuple[int, ...], int]], int]:
        """Read the keys, and the shape and end of every tensor behind the header.

        The last result is where the first tensor may begin.
        """
        version = self.number("<I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.file} is of version {version} of GGUF, or of another byte order; versions "
                f"{' and '.join(map(str, VERSIONS))} in little-endian order are read: convert it anew"
            )
        tensors, keys = self.number("<Q"), self.number("<Q")
        values = {}
        for _ in range(keys):
            key = self.string()
            values[key] = self.value(self.number("<I"))
        described = dict(self.tensor() for _ in range(tensors))
        alignment = values.get(ALIGNMENT)
        step = alignment if isinstance(alignment, int) and alignment > 0 else DEFAULT_ALIGNMENT
        return values, described, -(-self.opened.tell() // step) * step

    def number(self, layout: str) -> int:
        return int(struct.unpack(layout, self.opened.read(struct.calcsize(layout)))[0])

    def bytes_ahead(self, size: int) -> int:
        if size > self.length - self.opened.tell():
            raise EOFError
        return size

    def string(self) -> str:
        size = self.bytes_ahead(self.number("<Q"))
        if size > LONGEST_TEXT:
            raise ModelError(
                f"{self.file} is damaged: its header has a text of {size} bytes; {FETCH_AGAIN}"
            )
        return self.opened.read(size).decode(errors="replace")

    def value(self, kind: int) -> str | int | None:
        if kind == STRING:
            return self.string()
        if kind in INTEGERS:
            return self.number(INTEGERS[kind])
        length = None
        if kind == ARRAY:
            kind, length = self.number("<I"), self.number("<Q")
            if kind == STRING:
                for _ in range(length):
                    self.opened.seek(self.bytes_ahead(self.number("<Q")), os.SEEK_CUR)
                return length
        if kind not in FIXED_SIZES:
            raise ModelError(
                f"{self.file} is damaged: its header has a value of the unknown type {kind}; {FETCH_AGAIN}"
            )
        size = FIXED_SIZES[kind] * (1 if length is None else length)
        self.opened.seek(self.bytes_ahead(size), os.SEEK_CUR)
        return length

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int]]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string()
        dimensions = self.number("<I")
        if dimensions > MOST_DIMENSIONS:
            raise ModelError(
                f"{self.file} is damaged: the tensor {shortened(name, 60)} has {dimensions} dimensions; {FETCH_AGAIN}"
            )
        shape = tuple(self.number("<Q") for _ in range(dimensions))
        kind, offset = self.number("<I"), self.number("<Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{self.file}: the tensor {name} is quantised in a way (type {kind}) that the package gguf does not "
                f"know; update it, or {FETCH_AGAIN}"
            ) from error
        return name, (shape, offset + math.prod(shape) * block_bytes // block)


# What every language model's header says of its sizes, behind the name of the architecture and a
# full stop.
SIZES = ("block_count", "embedding_length")
TOKENS, EMBEDDING = "tokenizer.ggml.tokens", "token_embd.weight"


def read_model(
    file: Path, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in evaluation mode, and its tokenizer, from one GGUF file.

    The weights are those that the quantised ones stand for: training moves them on, and what is
    saved is a plain safetensors folder that keeps nothing of the quantisation.

    Args:
        dtype: Precision of the weights; None is float32.

    Raises:
        ModelError: The file is missing, truncated or of an architecture that transformers cannot
            read, or the package ``gguf`` is not installed.
    """
    folder, precision = str(file.parent), dtype or torch.float32
    causal_lm: Any = AutoModelForCausalLM
    tokenizer = read_tokenizer(file)
    with _reading(file):
        quantised, info = causal_lm.from_pretrained(
            folder,
            gguf_file=file.name,
            dtype=precision,
            trust_remote_code=False,
            output_loading_info=True,
        )
        if info["missing_keys"]:
            raise ValueError(
                f"it lacks {len(info['missing_keys'])} weights, such as {sorted(info['missing_keys'])[0]}"
            )
        # transformers refuses to save a model that it loaded from quantised weights.
        config = copy.deepcopy(quantised.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model: Any = causal_lm.from_config(
            config, dtype=precision, attn_implementation=attention_of(causal_lm, config)
        )
        model.load_state_dict(quantised.state_dict())
        use_float32_unembedding(model)
        entries = embedding_weight(model).shape[0]
        tokenizer = _without_entries_beyond(tokenizer, entries)
    require_room_for(tokenizer, entries, file)
    require_finite_weights(model, file)
    return model.to(distributed.device()).eval(), tokenizer


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file without its weights.

    ``ModelError`` as for :func:`read_model`.
    """
    with _reading(file):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, padding_side="left", trust_remote_code=False
        )
    return tokenizer


def _without_entries_beyond(
    tokenizer: PreTrainedTokenizerBase, entries: int
) -> PreTrainedTokenizerBase:
    """``tokenizer`` without the tokens for which the model has no embedding.

    transformers adds ``<|endoftext|>`` where a file has no unknown token; as text it would be an id
    out of range.
    """
    if len(tokenizer) <= entries:
        return tokenizer
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["id"] < entries
    ]
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


def read_config(file: Path) -> PretrainedConfig:
    """The architecture of a GGUF file, from its header; ``ModelError`` as for :func:`read_model`.

    transformers takes seconds for it, since it reads the whole vocabulary too, so that a command
    which asks several times is answered from memory while the file stays as it is.
    """
    with _reading(file):
        status = file.stat()
        read = _config_of(file.absolute(), status.st_ino, status.st_size, status.st_mtime_ns)
    return copy.deepcopy(read)


@lru_cache(maxsize=4)
def _config_of(file: Path, *status: int) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.from_pretrained(
        str(file.parent), gguf_file=file.name, trust_remote_code=False
    )
    return config


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Check the file, silence libraries, and turn their errors into ``ModelError``."""
    _readable_header(file)
    try:
        # Its progress bar obeys no setting of transformers.
        with quiet(), redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # numpy's, gguf's and transformers' own, of a file that is damaged or of another kind
        if is_exhausted(error):
            raise
        raise ModelError(
            f"cannot load {file}: {first_line(error)}; it may be damaged: fetch it again, or give a file that "
            "transformers reads"
        ) from error


def _readable_header(file: Path) -> GgufHeader:
    """The header of a GGUF file of an architecture that transformers reads.

    ``ModelError`` as for :func:`read_model`.

    It is read before transformers sees the file: of a file that is cut off or calls itself
    something else transformers says so late, or fills what it does not find with the sizes of a
    default model.
    """
    if not file.is_file():
        folder = (
            ", which is a folder: name the file in it" if file.is_dir() else "; correct the path"
        )
        raise ModelError(f"no GGUF file at {file}{folder}")
    if find_spec("gguf") is None:
        raise ModelError(f"{file} needs the package gguf: install rlhf-pipeline[gguf]")
    header = read_gguf_header(file)
    architecture = header.architecture
    if not _is_language_model(architecture):
        raise ModelError(
            f"{file} holds a model of the architecture {architecture!r}, which transformers cannot read from GGUF as a "
            "language model; give one of an architecture such as llama, qwen2 or gemma2, or a folder of safetensors"
        )
    missing = next((key for key in SIZES if f"{architecture}.{key}" not in header.values), None)
    if missing is not None:
        raise ModelError(
            f"{file} calls itself a model of the architecture {architecture}, but its header has no "
            f"{architecture}.{missing}: it is damaged or of another kind; fetch it again"
        )
    tokens, embedding = header.values.get(TOKENS), header.shapes.get(EMBEDDING)
    if not isinstance(tokens, int) or embedding is None:
        raise ModelError(
            f"{file} has no tokenizer or no embedding, so that it is no language model; give another file"
        )
    entries, declared = embedding[-1], header.values.get(f"{architecture}.vocab_size", tokens)
    if tokens > entries or declared != entries:
        raise ModelError(
            f"{file}: the tokenizer has {tokens} entries and the header names {declared}, but the embedding has "
            f"{entries}; fetch the file again, or convert the model anew"
        )
    return header


@cache
def _is_language_model(architecture: str) -> bool:
    """Whether transformers reads decoder-only language models of this architecture from GGUF files.

    llama.cpp writes qwen2moe and gpt-oss, transformers qwen2_moe and gpt_oss.
    """
    read = {_plain(name) for name in GGUF_SUPPORTED_ARCHITECTURES}
    return _plain(architecture) in read & {
        _plain(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "")

"""GGUF files (llama.cpp's format) as starting models: dequantised into a plain transformers model.

The header of a GGUF file, read without its weights: keys, tensors, and whether the file is as long as they say.

Source: the specification of the format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import copy
import io
import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
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
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_core.errors import ModelError, first_line
from rlhf_core.models.forward import embedding_weight
from rlhf_core.models.io import quiet, require_room_for
from rlhf_core.models.own_files import attention_of
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.runtime import distributed

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURE = "general.architecture"
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
# Types of values: bytes of the fixed ones by their number in the file, then the two of variable length.
FIXED_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
FETCH_AGAIN = "fetch the file again"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor that the header names: its shape, fastest dimension first, and its place after the header in bytes."""

    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """What the header of a GGUF file says.

    Attributes:
        values: The keys with their values where those are strings or integers, the lengths of arrays, None for others.
        tensors: By name.
        data_start: Position at which the first tensor may begin.
    """

    values: Mapping[str, str | int | None]
    tensors: Mapping[str, GgufTensor]
    data_start: int

    @property
    def architecture(self) -> str:
        """The name of the architecture; empty where the file has none."""
        return str(self.values.get(ARCHITECTURE) or "")


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header of ``file``, and check that every tensor that it names lies within the file.

    Raises:
        ModelError: It is not a GGUF file, of another version or byte order, or cut off.
    """
    if file.stat().st_size < len(MAGIC) or _first_bytes(file) != MAGIC:
        raise ModelError(f"{file} is not a GGUF file (its first bytes are not {MAGIC.decode()}); {FETCH_AGAIN}")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        length = len(content)
        try:
            header = _HeaderReader(content, file).header()
        except (struct.error, IndexError) as error:
            raise ModelError(
                f"{file} is cut off: it ends within its header, after {length} bytes; {FETCH_AGAIN}"
            ) from error
    for name, tensor in header.tensors.items():
        end = header.data_start + tensor.offset + tensor.size
        if end > length:
            raise ModelError(
                f"{file} is cut off: the tensor {name} ends at byte {end}, the file has {length}; {FETCH_AGAIN}"
            )
    return header


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(MAGIC))


class _HeaderReader:
    """Reads from the beginning of a file; ``struct.error`` or ``IndexError`` where it ends too early."""

    def __init__(self, content: mmap.mmap, file: Path) -> None:
        self.content, self.file = content, file
        self.position = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._number("<I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.file} is of version {version} of GGUF, or of another byte order; versions "
                f"{' and '.join(map(str, VERSIONS))} in little-endian order are read: convert it anew"
            )
        tensors, keys = self._number("<Q"), self._number("<Q")
        values = {}
        for _ in range(keys):
            key = self._string()
            values[key] = self._value(self._number("<I"))
        described = dict(self._tensor() for _ in range(tensors))
        alignment = values.get(ALIGNMENT)
        step = alignment if isinstance(alignment, int) and alignment > 0 else DEFAULT_ALIGNMENT
        return GgufHeader(values, described, -(-self.position // step) * step)

    def _number(self, layout: str) -> int:
        (number,) = struct.unpack_from(layout, self.content, self.position)
        self.position += struct.calcsize(layout)
        return int(number)

    def _skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self.content):
            raise IndexError(self.position)

    def _string(self) -> str:
        start = self.position + 8
        self._skip(8 + struct.unpack_from("<Q", self.content, self.position)[0])
        return self.content[start : self.position].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> str | int | None:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        if kind in INTEGERS:
            return self._number(INTEGERS[kind])
        self._skip(self._size_of(kind))
        return None

    def _array(self) -> int:
        kind, length = self._number("<I"), self._number("<Q")
        if kind != STRING:
            self._skip(length * self._size_of(kind))
            return length
        for _ in range(length):
            self._skip(8 + struct.unpack_from("<Q", self.content, self.position)[0])
        return length

    def _size_of(self, kind: int) -> int:
        if kind not in FIXED_SIZES:
            raise ModelError(
                f"{self.file} is damaged: its header has a value of the unknown type {kind}; {FETCH_AGAIN}"
            )
        return FIXED_SIZES[kind]

    def _tensor(self) -> tuple[str, GgufTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string()
        shape = tuple(self._number("<Q") for _ in range(self._number("<I")))
        kind, offset = self._number("<I"), self._number("<Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{self.file}: the tensor {name} is quantised in a way (type {kind}) that the package gguf does not "
                f"know; update it, or {FETCH_AGAIN}"
            ) from error
        return name, GgufTensor(shape, offset, math.prod(shape) * block_bytes // block)


SUFFIX = ".gguf"
# What every language model's header says of its sizes, behind the name of the architecture and a full stop.
SIZES = ("block_count", "embedding_length")
TOKENS, EMBEDDING = "tokenizer.ggml.tokens", "token_embd.weight"


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
        model: Any = causal_lm.from_config(config, dtype=precision, attn_implementation=attention_of(causal_lm, config))
        model.load_state_dict(quantised.state_dict())
        use_float32_unembedding(model)
        entries = embedding_weight(model).shape[0]
        tokenizer = _without_entries_beyond(tokenizer, entries)
    require_room_for(tokenizer, entries, file)
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


def open_gguf(file: Path) -> PreTrainedTokenizerBase:
    """Open a GGUF file without its weights, and return its tokenizer.

    Raises:
        ModelError: As for :func:`load_gguf`, for what can be told without loading the weights.
    """
    gguf_config(file)
    return load_gguf_tokenizer(file)


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
    _readable_header(file)
    try:
        # Its progress bar obeys no setting of transformers.
        with quiet(), redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # numpy's, gguf's and transformers' own, of a file that is damaged or of another kind
        raise ModelError(
            f"cannot load {file}: {first_line(error)}; it may be damaged: fetch it again, or give a file that "
            "transformers reads"
        ) from error


def _readable_header(file: Path) -> GgufHeader:
    """The header of a GGUF file of an architecture that transformers reads; ``ModelError`` as for :func:`load_gguf`.

    It is read before transformers sees the file: of a file that is cut off or calls itself something else transformers
    says so late, or fills what it does not find with the sizes of a default model.
    """
    if not file.is_file():
        folder = ", which is a folder: name the file in it" if file.is_dir() else "; correct the path"
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
    tokens, embedding = header.values.get(TOKENS), header.tensors.get(EMBEDDING)
    if not isinstance(tokens, int) or embedding is None:
        raise ModelError(f"{file} has no tokenizer or no embedding, so that it is no language model; give another file")
    entries, declared = embedding.shape[-1], header.values.get(f"{architecture}.vocab_size", tokens)
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
    return _plain(architecture) in read & {_plain(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "")

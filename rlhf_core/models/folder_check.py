"""Model folders are checked before anything is loaded from them.

Nothing that their files name or link to may lie outside of the folder, and no code comes from
elsewhere.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from rlhf_core.errors import ModelError, first_line, is_exhausted

# Files of a tokenizer; a model folder needs one of them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


GENERATION_CONFIG = "generation_config.json"


MOST_TENSORS = 250_000  # the largest mixtures of experts of 2026 have 200,000


# Bytes of a file that is read as a whole; the largest tokenizers and indexes of 2026 have 40 MB. As
# JSON it takes up to 24 times the memory.
MOST_BYTES = 128 * 2**20


# Lists, objects and separators in such a JSON file: 128 MB of empty lists would take 10 GB and
# minutes. The largest tokenizers of 2026 have two million.
MOST_VALUES = 6_000_000
# Tokens with their numbers or scores, or lines of a list of them, and all texts of such a file. Each
# is read, copied and sorted more than once. The largest vocabularies of 2026 have 262,144 tokens, and
# merges of 1,030,000 texts.
MOST_ENTRIES = 1_000_000
MOST_TEXTS = 1_800_000
_ENTRY = re.compile(rb'"\s*[:,]\s*-?\d')
# The same vocabularies as tables of SentencePiece, whose entries cannot be counted unread, have 5 MB.
MOST_BYTES_OF_TABLE = 16 * 2**20
# A configuration has some hundreds, and what reads it copies it more than once.
MOST_SETTINGS = 500_000


# Layers, labels or experts that a configuration counts: they are made one after another. The
# deepest models of 2026 have 200 layers.
MOST_PARTS = 10_000
COUNT_OF_PARTS = re.compile(r"(?:num|n)_(?:\w{1,40}_)?(?:layers?|labels|experts|blocks)$")


# A header of safetensors names a tensor by ten quotes; what else it has is a few words. Names of no
# tensor would be read again at each opening of the file.
QUOTES_OF_TENSOR = 10
QUOTES_OF_NAME = 4  # in an index
LENGTH_BYTES = 8


READ_AT_ONCE = 2**20


REPAIR = "make it again, or point to a complete Hugging Face folder"


def check_folder(path: Path) -> None:
    """Raise ``ModelError`` unless ``path`` has a config, safetensors weights and a tokenizer."""
    path = Path(path)
    if not path.is_dir():
        raise ModelError(f"no model folder at {path}; {REPAIR}")
    require_no_adapter(path)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; {REPAIR}")
    require_own_files(path)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        others = sorted(
            file.name for file in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth"))
        )
        kept = (
            f" (only {', '.join(others)}: pickled weights are never read; convert them)"
            if others
            else ""
        )
        raise ModelError(f"{path} has no .safetensors weights{kept}; {REPAIR}")
    tensors = 0
    for file in weights:  # the header shows truncated and foreign files before a slow load does
        try:
            _require_count(
                path, _names_in_header(file)
            )  # also opens what the package calls missing
            with safe_open(file, framework="pt") as opened:
                tensors += len(opened.keys())
        except (SafetensorError, OSError) as error:
            if is_exhausted(error):
                raise
            raise ModelError(
                f"{file} is not a readable safetensors file ({first_line(error)}); {REPAIR}"
            ) from error
    _require_count(path, tensors)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{path} has no tokenizer ({TOKENIZER_FILES[0]}); {REPAIR}")
    # transformers passes over a damaged one, and with it over the tokens that end a reply.
    if (path / GENERATION_CONFIG).is_file() and (reason := _json_fault(path / GENERATION_CONFIG)):
        raise ModelError(f"{path}: {reason}; correct it, or take it out")


def _require_few_parts(folder: Path) -> None:
    """Refuse a configuration that counts more parts of a model than anybody builds."""
    for file in _files(folder, *CONFIGS):
        for key, value in _counts_under(_json(file)):
            if value > MOST_PARTS:
                raise ModelError(
                    f"{folder}: its {file.name} has {key} {value:.3g}, and no model has more than {MOST_PARTS:,}; it is "
                    "damaged, or made to do harm: take another model"
                )


def _counts_under(config: Any) -> Iterator[tuple[str, float]]:
    """Name and value of all counts of parts in a configuration or in one of its parts."""
    left = [config]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            for key, number in value.items():
                if isinstance(number, int | float) and COUNT_OF_PARTS.match(key):
                    # An integer of many digits is no float.
                    yield key, float(min(number, 10**18))


def _names_in_header(file: Path) -> int:
    """Return how many tensors the quotes in the header of a safetensors file could name."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        return _signs(stream, b'"', most_bytes=length) // QUOTES_OF_TENSOR


def _signs(stream: BinaryIO, *signs: bytes, most_bytes: int = MOST_BYTES) -> int:
    """How often the signs stand in what comes next in a file, whose whole is never in memory."""
    left, found = min(most_bytes, MOST_BYTES), 0
    while left and (part := stream.read(min(left, READ_AT_ONCE))):
        found += sum(part.count(sign) for sign in signs)
        left -= len(part)
    return found


def _signs_of(file: Path, *signs: bytes) -> int:
    with file.open("rb") as stream:
        return _signs(stream, *signs)


def _has_more_entries(file: Path, most: int) -> bool:
    """Whether more texts than that are followed by a number, as tokens are in a vocabulary."""
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return next(islice(_ENTRY.finditer(content), most, None), None) is not None


def _too_many(file: Path, target: Path, size: int) -> str:
    """What a small file has more of than any model needs; empty where nothing.

    Fewer bytes than a limit are no more things than that: most files are not looked through.
    """
    if size > MOST_BYTES_OF_TABLE and any(map(file.match, TABLES)):
        return f"{MOST_BYTES_OF_TABLE:,} bytes"
    is_list = size > MOST_ENTRIES and any(map(file.match, LISTS))
    if is_list and max(_signs_of(target, b"\n"), _signs_of(target, b"\r")) > MOST_ENTRIES:
        return f"{MOST_ENTRIES:,} lines"
    if file.suffix != ".json":
        return ""
    is_config = any(map(file.match, (*CONFIGS, GENERATION_CONFIG)))
    most = MOST_SETTINGS if is_config else MOST_VALUES
    if size > most and _signs_of(target, b"[", b"{", b",") > most:
        return f"{most:,} lists, objects and items"
    if size > 2 * MOST_TEXTS and not file.match(INDEXES):
        if _signs_of(target, b'"') > 2 * MOST_TEXTS:
            return f"{MOST_TEXTS:,} texts"
        if _has_more_entries(target, MOST_ENTRIES):
            return f"{MOST_ENTRIES:,} entries of a vocabulary"
    return ""


def _require_count(path: Path, tensors: int) -> None:
    """Refuse so many tensors that looking at each would take minutes."""
    if tensors > MOST_TENSORS:
        raise ModelError(
            f"{path} names {tensors:,} tensors, and no model has more than {MOST_TENSORS:,}; it is damaged, or made to "
            "do harm: take another model"
        )


def require_no_adapter(path: Path) -> None:
    """Refuse a folder that holds an adapter.

    transformers would apply it to the model beside it.
    """
    if (path / ADAPTER_CONFIG).is_file():
        where = "beside a" if any(path.glob("model*.safetensors")) else "without its"
        raise ModelError(
            f"{path} holds an adapter {where} model ({ADAPTER_CONFIG}); merge the two (peft's merge_and_unload), "
            "and name the folder with the result"
        )


def _json_fault(file: Path) -> str:
    """What is wrong with a file that should hold a JSON object; empty where nothing is."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"its {file.name} is not valid JSON ({error})"
    return "" if isinstance(content, dict) else f"its {file.name} holds no JSON object"


# The library may take config.VERSION.json, and Mistral's own form.
CONFIGS = ("config*.json", "params.json")


# Vocabularies as tables of SentencePiece, and with one token or merge a line.
TABLES = ("*.model", "*.spm")
LISTS = ("*.txt", "*.codes", "*.tokenizer")


SMALL_FILES = ("*.json", "*.jinja", *TABLES, *LISTS, "additional_chat_templates/*")


SHARD, INDEXES = ".safetensors", "*.safetensors.index.json"


ADAPTER_CONFIG = "adapter_config.json"  # as the package peft names it


OTHER_WEIGHTS = "transformers_weights"


ATTENTION = frozenset(
    {"attn_implementation", "_attn_implementation", "_attn_implementation_internal"}
)


# Where a link may lead to out of the folder: a store that names its files by their content.
DVC_CACHE = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$")


def require_own_files(folder: Path) -> None:
    """Refuse a folder whose files name, or link to, what lies outside of it.

    Raises:
        ModelError: A file that would be read is a link out of the folder, no plain file, or huge; an
            index names a shard that is no safetensors file of the folder; a configuration names
            attention that would be fetched, or weights other than those that are checked.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    home = folder.resolve()
    # A snapshot of the hub's cache is links to its blobs.
    roots = [home]
    if home.parent.name == "snapshots":
        roots.append(home.parents[1] / "blobs")
    for file in _files(folder, *SMALL_FILES, f"*{SHARD}"):
        target = Path(os.path.realpath(file))  # resolve() fails on a link to itself
        if not target.exists():
            continue  # loading says what is missing
        if not any(map(target.is_relative_to, roots)) and not DVC_CACHE.search(target.as_posix()):
            raise ModelError(
                f"{folder}: its {file.name} is a link to {target}, outside of the folder; put the file itself there"
            )
        if not stat.S_ISREG(target.stat().st_mode) and not target.is_dir():
            raise ModelError(f"{folder}: its {file.name} is no plain file; put one there")
        size = target.stat().st_size
        if size > MOST_BYTES and file.suffix != SHARD:
            raise ModelError(
                f"{folder}: its {file.name} has {size:,} bytes, and is read as a whole; no model needs more than "
                f"{MOST_BYTES:,}: it is damaged, or made to do harm: take another model"
            )
        if what := _too_many(file, target, size):
            raise ModelError(
                f"{folder}: its {file.name} has more than {what}, which no model needs: it is damaged, or made to do "
                "harm: take another model"
            )
    for index in _files(folder, INDEXES):
        if index.is_file():
            _require_count(folder, _signs_of(index, b'"') // QUOTES_OF_NAME)
        content = _json(index)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        names = list(shards.values()) if isinstance(shards, dict) else []
        _require_count(folder, len(names))
        for name in names:
            if (
                not isinstance(name, str)
                or os.path.basename(name) != name
                or not name.endswith(SHARD)
            ):
                raise ModelError(
                    f"{folder}: its {index.name} names {name!r}; a shard is a {SHARD} file in the folder itself"
                )
    _require_few_parts(folder)
    known = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    for file in _files(folder, *CONFIGS):
        content = _json(file)
        if any(_texts_under(content, {OTHER_WEIGHTS})):
            raise ModelError(
                f"{folder}: its {file.name} names other weights ({OTHER_WEIGHTS}); take that out"
            )
        for name in _texts_under(content, ATTENTION):
            if name.removeprefix("paged|") not in known:
                raise ModelError(
                    f"{folder}: its {file.name} asks for the attention {name!r}, which is not part of transformers "
                    "and would be fetched from elsewhere; take attn_implementation out of it"
                )


def _files(folder: Path, *patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def _json(file: Path) -> Any:
    """The content of a JSON file; None where it is damaged, which loading says."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        return None


def _texts_under(config: Any, keys: Collection[str]) -> Iterator[str]:
    """All texts under these keys of a configuration or of one of its parts."""
    left = [(config, False)]
    while left:
        value, named = left.pop()
        if isinstance(value, dict):
            left += [(item, named or key in keys) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(item, named) for item in value]
        elif named and isinstance(value, str):
            yield value

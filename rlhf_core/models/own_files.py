"""What the files of a model folder name or link to: nothing outside of the folder, and no code from elsewhere."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from transformers import PretrainedConfig

from rlhf_core.errors import ModelError

CONFIGS = ("config*.json", "params.json")  # the library may take config.VERSION.json, and Mistral's own form
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*")
SHARD, INDEXES = ".safetensors", "*.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # as the package peft names it
ATTENTION = frozenset({"attn_implementation", "_attn_implementation", "_attn_implementation_internal"})
# Where a link may lead to out of the folder: a store that names its files by their content.
DVC_CACHE = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$")


def require_own_files(folder: Path) -> None:
    """Refuse a folder whose files name, or link to, what lies outside of it.

    Raises:
        ModelError: A file that would be read is a link out of the folder, or no plain file; an index names a shard
            that is no safetensors file of the folder; a configuration names attention that would be fetched.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    home = folder.resolve()
    # A snapshot of the hub's cache is links to its blobs.
    roots = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
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
    for index in _files(folder, INDEXES):
        content = _json(index)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        for name in shards.values() if isinstance(shards, dict) else ():
            if not isinstance(name, str) or PurePath(name).name != name or not name.endswith(SHARD):
                raise ModelError(
                    f"{folder}: its {index.name} names {name!r}; a shard is a {SHARD} file in the folder itself"
                )
    known = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    for file in _files(folder, *CONFIGS):
        for name in _attention_names(_json(file)):
            if name.removeprefix("paged|") not in known:
                raise ModelError(
                    f"{folder}: its {file.name} asks for the attention {name!r}, which is not part of transformers "
                    "and would be fetched from elsewhere; take attn_implementation out of it"
                )


def _files(folder: Path, *patterns: str) -> Iterator[Path]:
    return (file for pattern in patterns for file in sorted(folder.glob(pattern)))


def _json(file: Path) -> Any:
    """The content of a JSON file; None where it is damaged, which loading says."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        return None


def _attention_names(config: Any) -> Iterator[str]:
    """All texts under keys that name the attention of a model or of one of its parts."""
    left = [(config, False)]
    while left:
        value, named = left.pop()
        if isinstance(value, dict):
            left += [(item, named or key in ATTENTION) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(item, named) for item in value]
        elif named and isinstance(value, str):
            yield value


def attention_of(auto_class: Any, config: PretrainedConfig) -> str:
    """``sdpa``, scaled-dot-product attention, or ``eager`` for an architecture that cannot have it.

    Gemma 2 is such a one, whose scores have a soft cap, and BLOOM. Eager attention holds the scores of all positions.

    Args:
        auto_class: ``AutoModelForCausalLM`` or another of its kind, by which the model is made.
        config: The model's.
    """
    known = type(config) in auto_class._model_mapping
    return "sdpa" if not known or auto_class._model_mapping[type(config)]._supports_sdpa else "eager"

"""The starting model's configuration, read from its config.json alone: no weights are downloaded or
loaded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlhf_core.config.base import BaseConfig
from rlhf_core.errors import ModelError, first_line
from rlhf_core.models import foreign
from rlhf_core.models.architecture import limit_layers
from rlhf_core.models.causal_lm import require_decoder_only, scratch_config
from rlhf_core.models.folder_check import require_no_adapter
from rlhf_core.models.io import empty_model
from rlhf_core.models.readers import is_model_file, model_reader
from rlhf_core.runtime.limited_call import limit_reached

GIVE_FOLDER = "give a complete model folder"
LARGEST_CONFIG = 16 * 2**20
# Fields that differ between a model made by the base stage and its settings only in what the
# tokenizer decides.
SCRATCH_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
)  # fmt: skip


# Sizes of the models that profiles and documentation name, so that they can be planned offline.
# LLaMA: Touvron et al. 2023, table 2 (feed-forward 2/3 of 4H, rounded up to a multiple of 256);
# Llama 2 has twice the positions. SmolLM2 and Qwen2.5: their model cards.
PUBLISHED_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
PUBLISHED_CONFIGS = {
    name: dict(zip(PUBLISHED_FIELDS, sizes, strict=True))
    for name, sizes in {
        "huggyllama/llama-7b": ("llama", 32000, 4096, 11008, 32, 32, 32, 2048, False),
        "huggyllama/llama-13b": ("llama", 32000, 5120, 13824, 40, 40, 40, 2048, False),
        "meta-llama/Llama-2-7b-hf": ("llama", 32000, 4096, 11008, 32, 32, 32, 4096, False),
        "meta-llama/Llama-2-70b-hf": ("llama", 32000, 8192, 28672, 80, 64, 8, 4096, False),
        "meta-llama/Llama-2-13b-hf": ("llama", 32000, 5120, 13824, 40, 40, 40, 4096, False),
        "HuggingFaceTB/SmolLM2-135M": ("llama", 49152, 576, 1536, 30, 9, 3, 8192, True),
        "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", 49152, 576, 1536, 30, 9, 3, 8192, True),
        "HuggingFaceTB/SmolLM2-360M": ("llama", 49152, 960, 2560, 32, 15, 5, 8192, True),
        "HuggingFaceTB/SmolLM2-1.7B": ("llama", 49152, 2048, 8192, 24, 32, 32, 8192, True),
        "Qwen/Qwen2.5-0.5B": ("qwen2", 151936, 896, 4864, 24, 14, 2, 32768, True),
        "Qwen/Qwen2.5-32B": ("qwen2", 152064, 5120, 27648, 64, 40, 8, 32768, False),
        "Qwen/Qwen2.5-7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 32768, False),
    }.items()
}


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model's config.json; ``text`` is its JSON, so that two of the same
    sizes are equal.
    """

    text: str

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> Architecture:
        """The architecture of a config.json's content; ``ModelError`` where transformers knows no
        language model so.
        """
        architecture = cls(json.dumps(config, sort_keys=True))
        try:
            sizes = architecture.config()
            complete = all(
                getattr(sizes, field, None)
                for field in ("vocab_size", "hidden_size", "num_hidden_layers")
            )
        except Exception as error:  # validation errors of several libraries
            first = str(error).strip().split("\n", 1)[0].partition(" Should contain")[0].rstrip(".")
            raise ModelError(f"{name} is not the config.json of a known model ({first})") from error
        if not complete:
            raise ModelError(
                f"{name} is of type {sizes.model_type!r}, which is no decoder-only language model"
            )
        return architecture

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """The configuration with ``layers`` decoder layers, all of its own where None."""
        return _config(self.text, layers)

    def lower(self, layers: int | None) -> Architecture:
        """The model of the lowest ``layers`` layers; the same where None."""
        return (
            self
            if layers is None
            else Architecture(self.config(layers).to_json_string(use_diff=False))
        )


@cache
def _config(text: str, layers: int | None) -> PretrainedConfig:
    values = json.loads(text)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    # Token ids of generation settings play no part in memory, and may lie outside a small
    # vocabulary.
    config.pad_token_id, config.num_labels = 0, 1
    if layers is not None:
        limit_layers(config, layers)
    return config


def starting_architecture(
    base: BaseConfig, root: Path, config_file: Path | None = None
) -> Architecture:
    """The architecture of the model that ``base`` names, relative folders starting at ``root``.

    Args:
        base: The settings of the base stage: sizes, a folder, a GGUF file or a hub id.
        root: The workspace.
        config_file: A config.json that takes the place of the starting model's.

    Raises:
        ModelError: No configuration can be found. Only a hub id that :data:`PUBLISHED_CONFIGS`
            lacks is asked for on the hub, for its config.json alone.
    """
    folder = root / Path(os.path.expanduser(base.source))
    if config_file is not None:
        architecture = architecture_of_file(config_file)
    elif base.source == "scratch":
        return _from_scratch(base, root / "models" / "base" / "config.json")
    elif is_model_file(folder):
        config = model_reader(folder).read_config(folder)
        architecture = Architecture.of(config.to_dict(), base.source)
    elif folder.is_dir():
        require_no_adapter(folder)
        architecture = architecture_of_file(folder / "config.json")
    elif base.source in PUBLISHED_CONFIGS:
        architecture = Architecture.of(PUBLISHED_CONFIGS[base.source], base.source)
    else:
        architecture = _from_hub(base.source, base.revision)
    require_decoder_only(architecture.config(), config_file or base.source)
    return architecture


def architecture_of_file(file: Path) -> Architecture:
    """The architecture that a config.json describes, tried under limits first: it may be of
    somebody else's.

    Raises:
        ModelError: It is missing, broken, of no model, or building the model's lowest layers ends
            at a limit.
    """
    try:
        if file.exists() and not file.is_file():
            raise ModelError(f"{file} is no file; {GIVE_FOLDER}")
        if file.stat().st_size > LARGEST_CONFIG:
            raise ModelError(
                f"{file} has {file.stat().st_size} bytes, too many for a config.json; {GIVE_FOLDER}"
            )
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); {GIVE_FOLDER}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON ({error}); {GIVE_FOLDER}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{file} names no model_type, so it is no model's config.json; {GIVE_FOLDER}"
        )

    def build() -> None:
        torch.set_num_threads(1)
        empty_model(AutoModelForCausalLM, Architecture.of(config, str(file)).config(1))

    if reached := limit_reached(build, foreign.LIMITS):
        raise ModelError(
            f"{file}: building its model {reached}; it is damaged, or made to do harm: {GIVE_FOLDER}"
        )
    return Architecture.of(config, str(file))


def _from_scratch(base: BaseConfig, built: Path) -> Architecture:
    """The sizes in the settings; the vocabulary is known exactly once the base stage has run with
    the same settings.
    """
    declared = scratch_config(base, vocabulary=base.vocab_size)
    if built.is_file():
        made = architecture_of_file(built)
        if all(
            getattr(made.config(), size, None) == getattr(declared, size) for size in SCRATCH_SIZES
        ):
            return made
    return Architecture.of(declared.to_diff_dict(), "base")


def _from_hub(source: str, revision: str | None) -> Architecture:
    from huggingface_hub import hf_hub_download

    try:
        foreign.find_hub_model(
            source, revision
        )  # a hub that does not answer is given up here, not after minutes
        file = hf_hub_download(source, "config.json", revision=revision)
    except ModelError as error:
        raise ModelError(f"{error}; or give its config.json with --config FILE") from error
    except Exception as error:  # the hub client raises its own, OSError and ValueError
        raise ModelError(
            f"the sizes of {source} are unknown here and its config.json cannot be fetched ({first_line(error)}); give "
            f"one with --config FILE, or name one of {', '.join(sorted(PUBLISHED_CONFIGS))}"
        ) from error
    return architecture_of_file(Path(file))
